// What is known about the token under the pointer or in focus.

function fact(list, name, value) {
  const box = make("div");
  box.append(make("dt", "", name), make("dd", "", value));
  list.append(box);
}

function showDetails(host, canvas, position) {
  const { sample } = canvas;
  const token = canvas.state[position];
  const masked = token === sample.mask;
  host.replaceChildren();
  const head = make("p");
  const piece = make("span", "piece", masked ? "mask" : JSON.stringify(sample.set.texts[token]));
  head.append(piece, make("span", "muted", `  ${sample.method}`));
  const list = make("dl");
  fact(list, "token id", String(sample.set.ids[token]));
  fact(list, "position", `${position} (canvas ${sample.lengthOfPrompt + position})`);
  const region = sample.regions.find(([, start, end]) => start <= position && position < end);
  if (region) fact(list, "region", region[0]);
  const step = sample.commit[position];
  if (sample.given.has(position)) fact(list, "given", "before the first step");
  else if (step < 0) fact(list, "written", "never");
  else fact(list, "written in step", `${step + 1} of ${sample.steps}`);
  // A mask's numbers would give away what is not written yet.
  if (!masked && token === sample.tokens[position]) {
    for (const kind of COLOURINGS) {
      const values = kind.key && kind.key !== "step" ? sample.signal(kind.key) : null;
      if (values === null) continue;
      fact(list, kind.key === "margin" ? "margin to the runner-up" : kind.name, spoken(values[position]) + (kind.unit && Number.isFinite(values[position]) ? ` ${kind.unit}` : ""));
    }
  }
  host.append(head, list);
  const story = sample.storyOf(position);
  if (story.length > 1) host.append(storyLine(sample, story));
}

// Proposals that stay the same are told once, with the probability at the start and at the end.
function storyLine(sample, story) {
  const parts = [];
  let last = null;
  for (const [step, kind, token, prob] of story) {
    if (kind === "proposal" && last && last.kind === kind && last.token === token) {
      Object.assign(last, { to: step, end: prob });
      continue;
    }
    last = { kind, token, from: step, to: step, begin: prob, end: prob };
    parts.push(last);
  }
  const text = (token) => (token === sample.mask ? "mask" : JSON.stringify(sample.set.texts[token]));
  const lines = parts.map(({ kind, token, from, to, begin, end }) => {
    if (kind === "write") return `${from}: wrote ${text(token)}`;
    const range = from === to ? `${from}` : `${from}\u2013${to}`;
    const sure = Number.isNaN(begin) ? "" : from === to ? ` ${begin.toFixed(2)}` : ` ${begin.toFixed(2)} \u2192 ${end.toFixed(2)}`;
    return `${range}: ${text(token)}${sure}`;
  });
  return make("p", "story", `by step:  ${lines.join("  \u00b7  ")}`);
}

function noDetails(host) {
  host.replaceChildren(make("p", "muted", "Point at a token, or focus one, to see when and how surely it was written."));
}
