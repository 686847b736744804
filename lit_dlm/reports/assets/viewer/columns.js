// Samples as stored in the page. Columns are decoded when a sample is first looked at.

const NEVER = 0xffff;

function bytesOf(text) {
  const raw = atob(text ?? "");  // an empty column is left out
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

// The stored numbers are little-endian; a DataView reads them so on every machine.
function integers(text, width) {
  const bytes = bytesOf(text);
  const view = new DataView(bytes.buffer);
  const out = new Uint32Array(bytes.length / width);
  for (let i = 0; i < out.length; i++) {
    out[i] = width === 1 ? bytes[i] : width === 2 ? view.getUint16(2 * i, true) : view.getUint32(4 * i, true);
  }
  return out;
}

function halves(text) {
  const codes = integers(text, 2);
  const out = new Float32Array(codes.length);
  for (let i = 0; i < codes.length; i++) {
    const exponent = (codes[i] >> 10) & 31;
    const fraction = codes[i] & 1023;
    let value;
    if (exponent === 0) value = fraction * 2 ** -24;
    else if (exponent === 31) value = fraction ? NaN : Infinity;
    else value = (1 + fraction / 1024) * 2 ** (exponent - 15);
    out[i] = codes[i] >> 15 ? -value : value;
  }
  return out;
}

class TokenSet {
  constructor(raw) {
    this.label = raw.label;
    this.source = raw.source;
    this.available = raw.available;
    this.methods = raw.methods;
    this.ids = raw.tokens.ids;
    this.texts = raw.tokens.texts;
    this.special = new Set(raw.tokens.special);
    this.partial = new Set(raw.tokens.partial);
    this.width = raw.tokens.wide ? 4 : 2;
  }
}

class Sample {
  constructor(raw, sets, number) {
    this.raw = raw;
    this.number = number;
    this.set = sets[raw.set];
    this.setNumber = raw.set;
    this.uid = raw.uid;
    this.example = raw.example;
    this.task = raw.task || "";
    this.method = raw.method || "";
    this.grade = raw.correct === undefined ? "none" : raw.correct ? "right" : "wrong";
    this.steps = raw.steps;
    this.mask = raw.mask;
    this.regions = raw.regions || [];
    this.early = raw.early || [];
    this.given = new Set(raw.given || []);
  }

  once(name, make) {
    const value = make();
    Object.defineProperty(this, name, { value });
    return value;
  }

  get prompt() { return this.once("prompt", () => integers(this.raw.prompt, this.set.width)); }
  get tokens() { return this.once("tokens", () => integers(this.raw.tokens, this.set.width)); }
  get commit() {
    return this.once("commit", () => Int32Array.from(integers(this.raw.commit, 2), (s) => (s === NEVER ? -1 : s)));
  }
  get length() { return this.tokens.length; }
  get lengthOfPrompt() { return this.prompt.length; }
  get signalNames() { return Object.keys(this.raw.signals || {}); }

  signal(name) {
    this.signals ??= new Map();
    if (!this.signals.has(name)) {
      const text = (this.raw.signals || {})[name];
      this.signals.set(name, text === undefined ? null : halves(text));
    }
    return this.signals.get(name);
  }

  // Pixels of the drawn picture after `step` steps.
  frame(step) { return bytesOf(this.raw.frames[step]); }

  // The canvas after `step` steps: 0 is the start, `this.steps` the end.
  stateAt(step) {
    const state = Uint32Array.from(this.tokens);
    for (let i = 0; i < state.length; i++) if (this.commit[i] >= step) state[i] = this.mask;
    for (const [when, position, token] of this.early) {
      if (when < step && this.commit[position] >= step) state[position] = token;
    }
    return state;
  }

  // Positions that the last of `step` steps wrote.
  writtenBy(step) {
    const found = new Set();
    if (step > 0) {
      this.commit.forEach((when, position) => { if (when === step - 1) found.add(position); });
      for (const [when, position] of this.early) if (when === step - 1) found.add(position);
    }
    return found;
  }

  // Writes per step, overwritten ones included.
  get pace() {
    return this.once("pace", () => {
      const counts = new Uint32Array(this.steps);
      for (const when of this.commit) if (when >= 0) counts[when]++;
      for (const [when] of this.early) counts[when]++;
      return counts;
    });
  }

  // First row of every step among the recorded proposals; rows go by step, then masked position.
  get proposalRows() {
    return this.once("proposalRows", () => {
      const starts = new Uint32Array(this.steps + 1);
      for (let step = 0; step < this.steps; step++) {
        let masked = 0;
        for (const token of this.stateAt(step)) if (token === this.mask) masked++;
        starts[step + 1] = starts[step] + masked;
      }
      return starts;
    });
  }
  get seen() {
    return this.once("seen", () => (this.raw.seen === undefined ? null : integers(this.raw.seen, this.set.width)));
  }
  get sure() { return this.once("sure", () => (this.raw.sure === undefined ? null : integers(this.raw.sure, 1))); }

  // What the forward after `step` steps proposes: position to [token, probability].
  proposalsAt(step) {
    const found = new Map();
    if (this.seen === null || step >= this.steps) return found;
    let row = this.proposalRows[step];
    this.stateAt(step).forEach((token, position) => {
      if (token === this.mask) found.set(position, this.proposal(row++));
    });
    return found;
  }
  proposal(row) {
    const sure = this.sure === null || this.sure[row] === 255 ? NaN : this.sure[row] / 254;
    return [this.seen[row], sure];
  }

  // Everything that happened to a position, as [steps done, kind, token, probability].
  storyOf(position) {
    const story = [];
    for (const [when, where, token] of this.early) if (where === position) story.push([when + 1, "write", token, NaN]);
    if (this.commit[position] >= 0) story.push([this.commit[position] + 1, "write", this.tokens[position], NaN]);
    if (this.seen !== null) {
      for (let step = 0; step < this.steps; step++) {
        const state = this.stateAt(step);
        if (state[position] !== this.mask) continue;
        let row = this.proposalRows[step];
        for (let i = 0; i < position; i++) if (state[i] === this.mask) row++;
        story.push([step + 1, "proposal", ...this.proposal(row)]);
      }
    }
    return story.sort((a, b) => a[0] - b[0] || (a[1] < b[1] ? -1 : 1));
  }

  // Text of a row: special tokens left out, masks as a block, characters of several tokens whole.
  line(row, joined) {
    const groups = new Map((joined || []).map(([first, length, text]) => [first, [length, text]]));
    let out = "";
    for (let i = 0; i < row.length; i++) {
      if (groups.has(i)) {
        out += groups.get(i)[1];
        i += groups.get(i)[0] - 1;
      } else if (row[i] === this.mask) out += "\u2591";
      else if (!this.set.special.has(row[i])) out += this.set.texts[row[i]];
    }
    return out;
  }
  get text() { return this.once("text", () => this.line(this.tokens, this.raw.joined)); }
  get question() { return this.once("question", () => this.line(this.prompt, this.raw.prompt_joined)); }
  get haystack() {
    return this.once("haystack", () =>
      [this.uid, this.task, this.method, this.raw.answer || "", this.raw.verdict || "", this.question, this.text]
        .join("\n").toLowerCase());
  }
}
