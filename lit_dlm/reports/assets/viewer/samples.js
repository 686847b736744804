// The list of samples: filters, search, and cards of which only those in sight exist.

const CARD_HEIGHT = 102;
const GAP = 8;

class SampleList {
  constructor(samples, onOpen, onBeside) {
    this.samples = samples;
    this.shown = samples;
    this.onOpen = onOpen;
    this.onBeside = onBeside;
    this.host = document.getElementById("list");
    this.cards = document.getElementById("cards");
    this.count = document.getElementById("count");
    this.alive = new Map();
    this.fillFilters();
    this.host.addEventListener("scroll", () => this.later(), { passive: true });
    new ResizeObserver(() => this.later()).observe(this.host);
    const filters = document.getElementById("filters");
    filters.addEventListener("submit", (event) => event.preventDefault());
    // The search field has its own event; to render on leaving it would swallow the click that left it.
    filters.addEventListener("change", (event) => { if (event.target.id !== "search") this.filter(); });
    document.getElementById("search").addEventListener("input", () => {
      clearTimeout(this.typing);
      this.typing = setTimeout(() => this.filter(), 80);
    });
  }

  fillFilters() {
    const choices = {
      method: this.samples.map((sample) => sample.method),
      task: this.samples.map((sample) => sample.task),
      set: this.samples.map((sample) => sample.set.label),
    };
    for (const [name, values] of Object.entries(choices)) {
      const distinct = [...new Set(values)].filter((value) => value !== "");
      const select = document.getElementById(name);
      for (const value of distinct) {
        const option = make("option", "", value);
        option.value = value;
        select.append(option);
      }
      select.closest("label").hidden = distinct.length < 2;
    }
    document.getElementById("grade").closest("label").hidden = this.samples.every((sample) => sample.grade === "none");
  }

  filter() {
    const value = (name) => document.getElementById(name).value;
    const words = value("search").toLowerCase().trim();
    const [grade, method, task, set, order] = ["grade", "method", "task", "set", "order"].map(value);
    this.shown = this.samples.filter((sample) =>
      (!grade || sample.grade === grade) && (!method || sample.method === method) &&
      (!task || sample.task === task) && (!set || sample.set.label === set) &&
      (!words || sample.haystack.includes(words)));
    const rank = { wrong: 0, none: 1, right: 2 };
    if (order === "wrong") this.shown.sort((a, b) => rank[a.grade] - rank[b.grade]);
    if (order === "few") this.shown.sort((a, b) => a.steps - b.steps);
    if (order === "many") this.shown.sort((a, b) => b.steps - a.steps);
    this.host.scrollTop = 0;
    this.render();
  }

  later() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = null;
      this.render();
    });
  }

  render() {
    const width = this.cards.clientWidth;
    if (!width) return;
    this.across = Math.max(1, Math.floor((width + GAP) / (280 + GAP)));
    const pitch = CARD_HEIGHT + GAP;
    this.cards.style.height = `${Math.max(Math.ceil(this.shown.length / this.across) * pitch, 60)}px`;
    const first = Math.max(0, Math.floor(this.host.scrollTop / pitch) - 2) * this.across;
    const last = Math.min(this.shown.length, (Math.ceil((this.host.scrollTop + this.host.clientHeight) / pitch) + 2) * this.across);
    const inSight = new Set(this.shown.slice(first, last));
    for (const [sample, card] of this.alive) {
      if (inSight.has(sample)) continue;
      card.remove();
      this.alive.delete(sample);
    }
    // A card that stays in sight is moved and never replaced: a press that began on it must end on it. Setting the
    // height can take the scrollbar away, and then all of them are placed a second time, a frame later.
    const cell = (width - (this.across - 1) * GAP) / this.across;
    let place = first;
    for (const sample of inSight) {
      if (!this.alive.has(sample)) this.alive.set(sample, this.card(sample));
      const card = this.alive.get(sample);
      card.setAttribute("aria-setsize", this.shown.length);
      card.setAttribute("aria-posinset", place + 1);
      card.style.width = `${cell}px`;
      card.style.height = `${CARD_HEIGHT}px`;
      card.style.left = `${(place % this.across) * (cell + GAP)}px`;
      card.style.top = `${Math.floor(place / this.across) * pitch}px`;
      const next = this.cards.children[place - first];
      if (next !== card) this.cards.insertBefore(card, next ?? null);
      place += 1;
    }
    const total = this.samples.length;
    const text = this.shown.length === total ? `${total.toLocaleString("en")} samples` : `${this.shown.length.toLocaleString("en")} of ${total.toLocaleString("en")} samples`;
    if (this.count.textContent !== text) this.count.textContent = text;
    this.cards.querySelector(".empty")?.remove();
    if (!this.shown.length) this.cards.append(make("li", "empty", "No sample fits."));
  }

  card(sample) {
    const card = make("li", "card");
    card.dataset.number = sample.number;
    const head = make("div", "head");
    const grade = make("span", `grade ${sample.grade}`, { right: "\u2713", wrong: "\u2717", none: "\u2013" }[sample.grade]);
    grade.setAttribute("role", "img");
    grade.setAttribute("aria-label", { right: "right", wrong: "wrong", none: "not graded" }[sample.grade]);
    const pick = make("button", "pick", sample.example);
    pick.type = "button";
    pick.title = sample.uid;
    pick.addEventListener("click", () => this.onOpen(sample));
    const beside = make("button", "beside-button", "vs");
    beside.type = "button";
    beside.setAttribute("aria-label", `Compare ${sample.uid} with the open sample`);
    beside.addEventListener("click", () => this.onBeside(sample));
    head.append(grade, pick, beside);
    const set = SETS.length > 1 ? `${sample.set.label} \u00b7 ` : "";
    const facts = make("div", "facts", `${set}${sample.method ? `${sample.method} \u00b7 ` : ""}${sample.steps} steps \u00b7 ${(sample.length / Math.max(sample.steps, 1)).toFixed(1)} a step`);
    // The order in which the response was filled, one column a position.
    const order = Array.from(sample.commit, (step) =>
      step < 0 ? null : mixed(SEQUENTIAL, sample.steps > 1 ? step / (sample.steps - 1) : 1));
    card.append(head, facts, make("div", "preview", sample.text.trim()), strip(order));
    this.mark(card, sample);
    return card;
  }

  mark(card, sample) {
    card.classList.toggle("open", sample === this.open);
    card.classList.toggle("beside", sample === this.beside);
    if (sample === this.open) card.querySelector(".pick").setAttribute("aria-current", "true");
    else card.querySelector(".pick").removeAttribute("aria-current");
    card.querySelector(".beside-button").hidden = !this.open || sample === this.open;
  }

  show(open, beside) {
    this.open = open;
    this.beside = beside;
    for (const [shown, card] of this.alive) this.mark(card, shown);
  }

  // Scrolls only as far as needed.
  reveal(sample) {
    const place = this.shown.indexOf(sample);
    if (place < 0 || !this.across) return;
    const top = Math.floor(place / this.across) * (CARD_HEIGHT + GAP);
    if (top < this.host.scrollTop) this.host.scrollTop = top;
    else if (top + CARD_HEIGHT > this.host.scrollTop + this.host.clientHeight) this.host.scrollTop = top + CARD_HEIGHT - this.host.clientHeight;
    this.render();
  }
}
