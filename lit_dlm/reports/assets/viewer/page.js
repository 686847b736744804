// The page: what is open, which step is shown, and every control.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SETS = DATA.sets.map((raw) => new TokenSet(raw));
const SAMPLES = DATA.samples.map((raw, number) => new Sample(raw, SETS, number));
const byId = (name) => document.getElementById(name);

const now = { open: null, beside: null, step: 0, timer: null, canvases: [], reading: null, colour: "step", hash: "" };
const list = new SampleList(SAMPLES, (sample) => open(sample), (sample) => compareWith(sample));

function lastStep() { return Math.max(0, ...now.canvases.map((canvas) => canvas.sample.steps)); }

function options() {
  return Object.fromEntries(["special", "stable", "borders", "ghosts", "differ"].map((name) => [name, byId(name).checked]));
}

// -- opening --------------------------------------------------------------------------------

function open(sample, { beside = null, step = null } = {}) {
  pause();
  now.open = sample;
  now.beside = beside;
  document.body.classList.remove("grid");
  byId("overview").setAttribute("aria-pressed", "false");
  byId("prompt").textContent = visibleLines(promptText(sample));
  const shown = beside ? [sample, beside] : [sample];
  now.canvases = shown.map((one) => new Canvas(one));
  byId("panels").classList.toggle("two", shown.length > 1);
  byId("panels").replaceChildren(...now.canvases.map((canvas) => canvas.root));
  markDifferences();
  now.reading = null;
  noDetails(byId("details"));
  fillOther();
  fillColours();
  rebuild();
  byId("differ-label").hidden = !beside;
  byId("ghosts").closest("label").hidden = shown.every((one) => one.seen === null);
  byId("slider").max = lastStep();
  goTo(step === null ? lastStep() : step);
  list.show(sample, beside);
  list.later();
}

// With special tokens the prompt shows the chat template too.
function promptText(sample) {
  if (byId("special").checked) return sample.question.trim();
  return [...sample.prompt].map((token) => sample.set.texts[token]).join("");
}

function visibleLines(text) { return text.split("\n").map(visible).join("\n"); }

function compareWith(sample) {
  if (!now.open) return open(sample);
  open(now.open, { beside: sample === now.open ? null : sample, step: now.step });
}

// Cells of equal places whose final tokens differ; sets with other vocabularies compare by text.
function markDifferences() {
  if (now.canvases.length < 2) return;
  const [one, two] = now.canvases;
  const text = (canvas, i) => canvas.sample.set.texts[canvas.sample.tokens[i]];
  const differing = new Set();
  for (let i = 0; i < Math.max(one.sample.length, two.sample.length); i++) {
    if (text(one, i) !== text(two, i)) differing.add(i);
  }
  for (const canvas of now.canvases) canvas.differing = differing;
}

function siblings(sample) { return SAMPLES.filter((other) => other !== sample && other.example === sample.example); }

function fillOther() {
  const select = byId("other");
  const near = siblings(now.open);
  const listed = now.beside && !near.includes(now.beside) ? [...near, now.beside] : near;
  const none = make("option", "", listed.length ? "nothing" : "no other decode");
  none.value = "";
  select.replaceChildren(none, ...listed.map((sample) => {
    const set = SETS.length > 1 ? `${sample.set.label}: ` : "";
    const option = make("option", "", `${set}${near.includes(sample) ? sample.method || sample.uid : sample.uid} (${sample.grade === "none" ? "" : `${sample.grade}, `}${sample.steps} steps)`);
    option.value = sample.number;
    return option;
  }));
  select.disabled = !listed.length;
  select.value = now.beside ? now.beside.number : "";
}

// -- colours --------------------------------------------------------------------------------

function fillColours() {
  const select = byId("colour");
  const recorded = new Set(["", "step", ...now.canvases.flatMap((canvas) => canvas.sample.signalNames)]);
  select.replaceChildren(...COLOURINGS.map(({ key, name }) => {
    const option = make("option", "", recorded.has(key) ? name : `${name} (not recorded)`);
    option.value = key;
    option.disabled = !recorded.has(key);
    return option;
  }));
  select.value = recorded.has(now.colour) ? now.colour : "step";
}

function rebuild() {
  const scale = new Scale(byId("colour").value, now.canvases.map((canvas) => canvas.sample));
  for (const canvas of now.canvases) {
    canvas.step = Math.min(now.step, canvas.sample.steps);
    canvas.build(options(), scale);
  }
  showLegend(scale);
}

function showLegend(scale) {
  const host = byId("legend");
  host.replaceChildren();
  if (!scale.kind.key) return;
  if (scale.empty) {
    host.append("no values");
    return;
  }
  const bar = strip(Array.from({ length: 64 }, (_, i) => mixed(scale.stops(), i / 63)));
  const [low, high] = scale.kind.key === "step" ? [`step ${scale.low}`, `${scale.high}`] : [spoken(scale.low), spoken(scale.high)];
  host.append(low, bar, `${high}${scale.kind.unit ? ` ${scale.kind.unit}` : ""}`);
  host.title = scale.kind.about || "";
}

// -- steps ----------------------------------------------------------------------------------

function goTo(step) {
  now.step = Math.min(Math.max(step, 0), lastStep());
  for (const canvas of now.canvases) canvas.show(now.step);
  byId("slider").value = now.step;
  byId("slider").setAttribute("aria-valuetext", `${now.step} of ${lastStep()} steps done`);
  byId("position").textContent = `step ${now.step} / ${lastStep()}`;
  byId("back").disabled = byId("first").disabled = now.step === 0;
  byId("forward").disabled = byId("last").disabled = now.step === lastStep();
  if (now.reading) read(...now.reading);
  if (now.timer === null) say();
  remember();
}

// For screen readers; while it plays they would be told too much.
function say() {
  byId("said").textContent = now.canvases.map((canvas) => canvas.counts.textContent).join("; ");
}

function play() {
  if (now.step >= lastStep()) goTo(0);
  byId("play").textContent = "Pause";
  const tick = () => {
    goTo(now.step + 1);
    if (now.step >= lastStep()) pause();
    else now.timer = setTimeout(tick, 1000 / Number(byId("speed").value));
  };
  now.timer = setTimeout(tick, 1000 / Number(byId("speed").value));
}

function pause() {
  if (now.timer !== null) clearTimeout(now.timer);
  now.timer = null;
  byId("play").textContent = "Play";
}

function toggle() {
  if (now.timer === null) play();
  else {
    pause();
    say();
  }
}

// -- tokens ---------------------------------------------------------------------------------

function read(canvas, position) {
  if (now.reading) now.reading[0].cells[now.reading[1]]?.classList.remove("reading");
  now.reading = [canvas, position];
  canvas.cells[position].classList.add("reading");
  showDetails(byId("details"), canvas, position);
}

function cellOf(event) {
  const cell = event.target instanceof Element ? event.target.closest(".cell") : null;
  if (cell === null) return null;
  const canvas = now.canvases.find((one) => one.response.contains(cell));
  return canvas ? [canvas, Number(cell.dataset.position)] : null;
}

function focusCell(canvas, position) {
  const cells = canvas.cells;
  const next = Math.min(Math.max(position, 0), cells.length - 1);
  for (const cell of cells) cell.tabIndex = -1;
  cells[next].tabIndex = 0;
  cells[next].focus();
}

byId("panels").addEventListener("pointerover", (event) => {
  const found = cellOf(event);
  if (found) read(...found);
});
byId("panels").addEventListener("focusin", (event) => {
  const found = cellOf(event);
  if (found) read(...found);
});
byId("panels").addEventListener("click", (event) => {
  const found = cellOf(event);
  if (found) focusCell(...found);
});

// -- controls -------------------------------------------------------------------------------

function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
function nameTheme() { byId("theme").textContent = isDark() ? "Light" : "Dark"; }
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  nameTheme();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);

function overview(on) {
  pause();
  document.body.classList.toggle("grid", on);
  byId("overview").setAttribute("aria-pressed", String(on));
  list.later();
  if (!on && now.open) requestAnimationFrame(() => list.reveal(now.open));
}

function neighbour(by) {
  const place = list.shown.indexOf(now.open);
  const next = list.shown[place < 0 ? 0 : place + by];
  if (next) {
    open(next);
    list.reveal(next);
  }
}

function nextSibling() {
  const near = siblings(now.open);
  if (near.length) compareWith(near[(near.indexOf(now.beside) + 1) % near.length]);
}

function nextColour() {
  const select = byId("colour");
  const choices = [...select.options].filter((option) => !option.disabled);
  select.value = choices[(choices.findIndex((option) => option.value === select.value) + 1) % choices.length].value;
  select.dispatchEvent(new Event("change"));
}

byId("slider").addEventListener("input", () => { pause(); goTo(Number(byId("slider").value)); });
byId("colour").addEventListener("change", () => { now.colour = byId("colour").value; rebuild(); remember(); });
for (const name of ["special", "stable", "borders", "ghosts", "differ"]) {
  byId(name).addEventListener("change", () => {
    byId("prompt").textContent = visibleLines(promptText(now.open));
    rebuild();
    remember();
  });
}
byId("other").addEventListener("change", () => {
  const value = byId("other").value;
  open(now.open, { beside: value === "" ? null : SAMPLES[Number(value)], step: now.step });
});
byId("help-open").addEventListener("click", () => byId("help").showModal());

const KEYS = {
  ArrowLeft: () => { pause(); goTo(now.step - 1); },
  ArrowRight: () => { pause(); goTo(now.step + 1); },
  Home: () => { pause(); goTo(0); },
  End: () => { pause(); goTo(lastStep()); },
  " ": toggle,
  n: () => neighbour(1),
  p: () => neighbour(-1),
  c: nextColour,
  m: nextSibling,
  g: () => overview(!document.body.classList.contains("grid")),
  d: () => { setTheme(isDark() ? "light" : "dark"); remember(); },
  "/": () => {
    if (getComputedStyle(byId("search").closest(".side")).display === "none") overview(true);
    byId("search").focus();
  },
};
const BUTTONS = { first: "Home", back: "ArrowLeft", play: " ", forward: "ArrowRight", last: "End", overview: "g", theme: "d" };
for (const [name, key] of Object.entries(BUTTONS)) byId(name).addEventListener("click", KEYS[key]);

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const at = event.target;
  const field = at.closest("input, select, textarea");
  if (field && field.type !== "checkbox" && !(field.type === "range" && event.key === " ")) return;
  if (event.key === " " && at.closest("button, input[type=checkbox]")) return;
  const found = cellOf(event);
  if (found && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
    event.preventDefault();
    focusCell(found[0], found[1] + (event.key === "ArrowLeft" ? -1 : 1));
    return;
  }
  const action = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

// -- address --------------------------------------------------------------------------------

// What is open stands in the address, so that it can be linked to.
function address() {
  if (!now.open || now.timer !== null) return null;
  const parts = new URLSearchParams({ uid: now.open.uid });
  if (now.open.setNumber > 0) parts.set("set", now.open.setNumber);
  if (now.beside) {
    parts.set("with", now.beside.uid);
    if (now.beside.setNumber > 0) parts.set("with_set", now.beside.setNumber);
  }
  if (now.step !== lastStep()) parts.set("step", now.step);
  if (byId("ghosts").checked) parts.set("proposals", "1");
  if (byId("colour").value !== "step") parts.set("colour", byId("colour").value || "none");
  if (document.documentElement.dataset.theme) parts.set("theme", document.documentElement.dataset.theme);
  return `#${parts}`;
}

// Browsers stop a page that changes its address too often, as it would while the slider moves.
function remember() {
  clearTimeout(now.writing);
  now.writing = setTimeout(() => {
    const hash = address();
    // Somebody else may have changed the address since: it is to be followed, not replaced.
    if (hash === null || location.hash !== now.hash) return;
    // Inside of a notebook the page has no address.
    if (location.protocol === "about:") return;
    if (hash !== now.hash) history.replaceState(null, "", hash);
    now.hash = location.hash;
  }, 200);
}

function named(uid, set) { return SAMPLES.find((sample) => sample.uid === uid && sample.setNumber === Number(set || 0)); }

function follow() {
  now.hash = location.hash;
  const parts = new URLSearchParams(location.hash.slice(1));
  const theme = parts.get("theme");
  if (theme === "dark" || theme === "light") setTheme(theme);
  if (parts.has("colour")) now.colour = parts.get("colour") === "none" ? "" : parts.get("colour");
  const wanted = parts.get("uid");
  const sample = wanted === null ? SAMPLES[0] : named(wanted, parts.get("set"));
  if (!sample) byId("said").textContent = `no sample ${wanted}`;
  if (parts.has("proposals")) byId("ghosts").checked = parts.get("proposals") === "1";
  const step = parts.has("step") ? Number(parts.get("step")) : null;
  open(sample || SAMPLES[0], { beside: named(parts.get("with"), parts.get("with_set")) || null, step });
  const token = Number(parts.get("token") ?? NaN);
  if (now.canvases[0].cells[token]) read(now.canvases[0], token);
  requestAnimationFrame(() => list.reveal(now.open));
}

addEventListener("hashchange", follow);

const shownOf = SETS.map((set, number) => {
  const count = SAMPLES.filter((sample) => sample.setNumber === number).length;
  const part = count < set.available ? `${count.toLocaleString("en")} of ${set.available.toLocaleString("en")} samples` : `${count.toLocaleString("en")} samples`;
  return `${set.source}: ${part}`;
});
byId("source").textContent = shownOf.join("; ");
byId("source").title = shownOf.join("; ");
document.body.classList.toggle("single", SAMPLES.length === 1);
nameTheme();
list.render();
follow();
