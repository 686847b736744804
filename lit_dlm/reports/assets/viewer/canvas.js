// One decode: its cells, its counts, and how many tokens each step wrote.

function make(tag, classes, text) {
  const node = document.createElement(tag);
  if (classes) node.className = classes;
  if (text !== undefined) node.textContent = text;
  return node;
}

// A row of colours, one a pixel; none where there is null.
function strip(colours) {
  const row = make("canvas");
  row.width = Math.max(colours.length, 1);
  row.height = 1;
  row.setAttribute("aria-hidden", "true");
  const context = row.getContext("2d");
  colours.forEach((colour, place) => {
    if (colour === null) return;
    context.fillStyle = css(colour);
    context.fillRect(place, 0, 1, 1);
  });
  return row;
}

const SIGNS = { "\n": "\u23CE", "\t": "\u21E5", "\r": "\u240D" };

// Line breaks and control characters would tear the canvas apart; they get a sign.
function visible(text) {
  return text.replace(/[\u0000-\u001f\u007f]/g, (c) => SIGNS[c] || String.fromCodePoint(0x2400 + (c === "\u007f" ? 0x21 : c.charCodeAt(0))));
}

// Columns that a text takes in a monospaced font; wide scripts take two.
function columnsOf(text) {
  let count = 0;
  for (const c of text) count += /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\u{1f300}-\u{1faff}]/u.test(c) ? 2 : 1;
  return count;
}

class Canvas {
  constructor(sample) {
    this.sample = sample;
    this.step = -1;
    this.root = make("article", "panel");
    this.root.setAttribute("aria-label", `Decode ${sample.uid}`);
    this.root.append(this.heading());
    this.counts = make("p", "counts");
    this.response = make("div", "canvas text");
    this.response.setAttribute("role", "group");
    this.response.setAttribute("aria-label", "Response");
    this.cells = [];
    this.root.append(this.counts);
    if (sample.raw.frames) {
      this.picture = make("canvas", "picture");
      this.picture.width = this.picture.height = Math.sqrt(sample.frame(0).length / 3);
      this.picture.setAttribute("role", "img");
      this.picture.setAttribute("aria-label", "Drawn picture");
      this.root.append(this.picture);
    }
    this.root.append(this.response, this.paceChart());
    this.groups = new Map();
    for (const [first, length, text] of sample.raw.joined || []) {
      for (let i = 0; i < length; i++) this.groups.set(first + i, [first, length, text]);
    }
  }

  heading() {
    const { sample } = this;
    const box = make("div");
    const title = make("div", "title");
    title.append(make("h2", "", sample.method || sample.uid));
    const grades = { right: "\u2713 right", wrong: `\u2717 ${sample.raw.verdict || "wrong"}`.replace("_", " "), none: "not graded" };
    title.append(make("span", `badge ${sample.grade}`, grades[sample.grade]));
    const ends = { complete: "", eos: "stopped at end of text", step_limit: "unfinished: step limit", aborted: "aborted" };
    if (ends[sample.raw.status]) title.append(make("span", "badge", ends[sample.raw.status]));
    if (sample.raw.reward !== undefined) title.append(make("span", "badge", `reward ${spoken(sample.raw.reward)}`));
    if (SETS.length > 1) title.append(make("span", "badge", sample.set.label));
    box.append(title);
    const line = sample.set.methods[sample.method];
    if (line) box.append(make("p", "decoder", line));
    if (sample.raw.answer !== undefined || sample.raw.detail !== undefined) {
      const answer = make("p", "answer");
      if (sample.raw.answer !== undefined) answer.append("answer ", make("code", "", sample.raw.answer), " ");
      if (sample.raw.detail !== undefined) answer.append(sample.raw.detail);
      box.append(answer);
    }
    return box;
  }

  paceChart() {
    const { sample } = this;
    const box = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    box.setAttribute("class", "pace");
    box.setAttribute("aria-hidden", "true");
    box.setAttribute("preserveAspectRatio", "none");
    // A chart has room for some hundred bars; longer decodes show the most of neighbouring steps.
    const size = Math.max(1, Math.ceil(sample.steps / 400));
    const heights = [];
    sample.pace.forEach((count, step) => {
      const bar = Math.floor(step / size);
      heights[bar] = Math.max(heights[bar] || 0, count);
    });
    const most = Math.max(1, ...heights);
    this.room = Math.max(heights.length, 32);
    box.setAttribute("viewBox", `0 0 ${this.room} 34`);
    this.bars = heights.map((count, number) => {
      const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      const height = count ? Math.max(2, (30 * count) / most) : 0;
      for (const [name, value] of Object.entries({ x: number + 0.08, width: 0.84, y: 34 - height, height })) bar.setAttribute(name, value);
      box.append(bar);
      return { bar, from: number * size + 1, to: Math.min((number + 1) * size, sample.steps) };
    });
    box.addEventListener("click", (event) => {
      const frame = box.getBoundingClientRect();
      const place = Math.floor(((event.clientX - frame.left) / frame.width) * this.room);
      const bar = this.bars[Math.min(Math.max(place, 0), this.bars.length - 1)];
      if (bar) goTo(bar.to);
    });
    return box;
  }

  // Builds the cells anew: after a change of display options.
  build(options, scale) {
    this.options = options;
    this.scale = scale;
    this.values = scale.valuesOf(this.sample);
    this.response.replaceChildren();
    this.cells = [];
    const starts = new Map();
    if (options.borders) for (const [name, start] of this.sample.regions) starts.set(start, name);
    const named = this.sample.regions.some(([name]) => !/^block \d+$/.test(name));
    const parts = document.createDocumentFragment();
    for (let i = 0; i < this.sample.length; i++) {
      if (starts.has(i) && named) {
        const tag = make("span", "region", starts.get(i));
        parts.append(tag);
      }
      // A token that begins with a line break stands on the new line, one that ends with it before.
      const text = options.stable ? this.finalText(i) : "";
      if (text.length > 1 && text.startsWith("\n")) parts.append(document.createElement("br"));
      const cell = make("span", "cell");
      cell.dataset.position = i;
      cell.tabIndex = -1;
      this.cells.push(cell);
      parts.append(cell);
      if (text.lastIndexOf("\n") > 0 || text === "\n") parts.append(document.createElement("br"));
    }
    this.edges = new Set([...starts.keys()].filter((start) => start > 0 || named));
    this.response.append(parts);
    if (this.cells.length) this.cells[0].tabIndex = 0;
    this.drawn = new Array(this.sample.length).fill("");
    const step = this.step;
    this.step = -1;
    if (step >= 0) this.show(step);
  }

  finalText(position) {
    const group = this.groups.get(position);
    if (group) return position === group[0] ? group[2] : "";
    return this.sample.set.texts[this.sample.tokens[position]];
  }

  // Text of a cell; the first token of a character that several tokens make carries it.
  textAt(state, position) {
    const { set, tokens } = this.sample;
    const group = this.groups.get(position);
    if (group && state[position] === tokens[position]) {
      const [first, length, text] = group;
      let whole = true;
      for (let i = first; i < first + length; i++) whole &&= state[i] === tokens[i];
      if (whole) return position === first ? text : "";
    }
    return set.texts[state[position]];
  }

  show(step) {
    const { sample, options } = this;
    const done = Math.min(step, sample.steps);
    if (done === this.step) return;
    this.step = done;
    const state = sample.stateAt(done);
    const fresh = sample.writtenBy(done);
    const ghosts = options.ghosts ? sample.proposalsAt(done) : new Map();
    let filled = 0;
    for (let i = 0; i < state.length; i++) {
      if (state[i] !== sample.mask) filled++;
      this.draw(i, state, fresh.has(i), ghosts.get(i));
    }
    this.bars.forEach(({ bar, from, to }) => {
      bar.setAttribute("class", done >= from && done <= to ? "now" : done > to ? "done" : "");
    });
    this.counts.textContent = `step ${done} of ${sample.steps} \u00b7 ${filled} of ${state.length} filled \u00b7 ${fresh.size} new`;
    this.state = state;
    if (this.picture) this.paint(sample.frame(done));
  }

  paint(pixels) {
    const pen = this.picture.getContext("2d");
    const image = pen.createImageData(this.picture.width, this.picture.height);
    for (let i = 0; i < pixels.length / 3; i++) {
      image.data.set([...pixels.subarray(3 * i, 3 * i + 3), 255], 4 * i);
    }
    pen.putImageData(image, 0, 0);
  }

  draw(i, state, isNew, ghost) {
    const { sample, options } = this;
    const cell = this.cells[i];
    const masked = state[i] === sample.mask;
    const special = !masked && sample.set.special.has(state[i]);
    const classes = ["cell"];
    let text = masked ? "\u00b7" : this.textAt(state, i);
    let colour = null;
    if (masked) {
      classes.push("mask");
      if (ghost !== undefined && !sample.set.special.has(ghost[0])) {
        classes.push("ghost");
        text = sample.set.texts[ghost[0]];
      }
    } else if (special && options.special) {
      classes.push(options.stable ? "blank" : "gone");
      text = "";
    } else if (special) classes.push("special");
    if (!masked && this.values !== null && state[i] === sample.tokens[i]) colour = this.scale.colour(this.values[i]);
    if (isNew) classes.push("new");
    if (sample.given.has(i)) classes.push("given");
    if (this.edges.has(i)) classes.push("edge");
    if (options.differ && this.differing && this.differing.has(i) && !special) classes.push("differs");
    const shown = visible(text);
    if (columnsOf(shown) > 40) classes.push("long");
    const key = `${classes.join(" ")}|${shown}|${colour}`;
    if (this.drawn[i] === key) return;
    this.drawn[i] = key;
    cell.className = classes.join(" ") + (cell.classList.contains("reading") ? " reading" : "");
    cell.textContent = shown;
    if (!options.stable) this.breakAround(cell, masked ? "" : text);
    // Places are kept for what will stand there, so that nothing moves while it plays.
    cell.style.minWidth = options.stable && !special ? `calc(${Math.max(1, columnsOf(visible(this.placeFor(i))))}ch + 2px)` : "";
    cell.style.background = colour && !classes.includes("blank") ? css(colour) : "";
    cell.style.color = colour && !classes.includes("blank") ? inkOn(colour) : "";
    cell.setAttribute("aria-label", masked ? "mask" : shown || sample.set.texts[state[i]]);
  }

  // Line breaks of a canvas that does not keep places follow the tokens that stand now.
  breakAround(cell, text) {
    const wanted = [text.length > 1 && text.startsWith("\n"), text.lastIndexOf("\n") > 0 || text === "\n"];
    [cell.previousSibling, cell.nextSibling].forEach((sibling, side) => {
      const mine = sibling instanceof HTMLBRElement && sibling.owner === cell;
      if (mine && !wanted[side]) sibling.remove();
      if (!mine && wanted[side]) {
        const end = document.createElement("br");
        end.owner = cell;
        if (side) cell.after(end);
        else cell.before(end);
      }
    });
  }

  placeFor(position) {
    const token = this.sample.tokens[position];
    if (this.sample.set.special.has(token) && this.options.special) return " ";
    if (token === this.sample.mask) return " ";
    const text = this.finalText(position);
    return columnsOf(text) > 40 ? " " : text;
  }
}
