// Colours of cells. Sequential values run from violet to yellow, signed ones from blue to orange;
// both keep their order for colour-blind readers.

const SEQUENTIAL = [[68, 1, 84], [70, 50, 127], [54, 92, 141], [39, 127, 142], [31, 161, 135], [74, 194, 109], [159, 218, 58], [253, 231, 37]];
const SIGNED = [[33, 85, 155], [104, 161, 207], [190, 216, 233], [242, 242, 240], [247, 205, 160], [226, 140, 64], [166, 79, 10]];

const COLOURINGS = [
  { key: "", name: "none" },
  { key: "step", name: "commit step", low: "first", high: "last" },
  { key: "confidence", name: "confidence", from: 0, to: 1, about: "probability of the token when it was written" },
  { key: "entropy", name: "entropy", from: 0, unit: "nats", about: "before the step that wrote the token" },
  { key: "margin", name: "margin", about: "lead over the best candidate that was passed over, in the policy's score" },
  { key: "log_prob", name: "log-probability", to: 0, about: "under the sampling policy" },
  { key: "policy_score", name: "policy score", about: "what the commit policy ranked by" },
  { key: "value", name: "value", about: "what the value model expected" },
  { key: "token_rewards", name: "token reward", signed: true, about: "process reward" },
  { key: "advantage", name: "advantage", signed: true, about: "above or below what was expected" },
];

function mixed(stops, share) {
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  return stops[low].map((value, i) => Math.round(value + (place - low) * (stops[low + 1][i] - value)));
}

function css(rgb) { return `rgb(${rgb.join(" ")})`; }

// Black or white, whichever has more contrast: at least 4.5 : 1 on any ground.
function inkOn(rgb) {
  const [r, g, b] = rgb.map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  const light = 0.2126 * r + 0.7152 * g + 0.0722 * b;
  return (light + 0.05) ** 2 > 0.05 * 1.05 ? "#000" : "#fff";
}

// A scale over the finite values of several samples, so that both sides of a comparison share it.
class Scale {
  constructor(key, samples) {
    this.kind = COLOURINGS.find((colouring) => colouring.key === key) || COLOURINGS[0];
    let low = Infinity;
    let high = -Infinity;
    for (const sample of samples) {
      for (const value of this.valuesOf(sample) || []) {
        if (!Number.isFinite(value)) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    this.low = this.kind.from ?? low;
    this.high = this.kind.to ?? high;
    if (key === "step") {
      this.low = 1;
      this.high = Math.max(...samples.map((sample) => sample.steps), 1);
    }
    if (this.kind.signed) {
      this.high = Math.max(Math.abs(low), Math.abs(high));
      this.low = -this.high;
    }
    this.empty = !Number.isFinite(this.low) || !Number.isFinite(this.high);
  }

  valuesOf(sample) {
    if (this.kind.key === "") return null;
    if (this.kind.key === "step") return Float32Array.from(sample.commit, (step) => (step < 0 ? NaN : step + 1));
    return sample.signal(this.kind.key);
  }

  // RGB of a value, or null where there is none.
  colour(value) {
    if (this.empty || Number.isNaN(value)) return null;
    const width = this.high - this.low;
    const share = width > 0 ? (value - this.low) / width : 1;
    return mixed(this.kind.signed ? SIGNED : SEQUENTIAL, share);
  }

  stops() { return this.kind.signed ? SIGNED : SEQUENTIAL; }
}

function spoken(value) {
  if (value === Infinity) return "no other candidate";
  if (!Number.isFinite(value)) return "not recorded";
  if (Number.isInteger(value)) return String(value);
  return Math.abs(value) >= 100 ? value.toFixed(0) : value.toFixed(3);
}
