// The steps that a browser keeps, and the arithmetic of charts: what is in view, bins of a pixel, round ticks.

import { isNumber } from "./text.js";

const MOST = 6000; // then every second of the older ones goes

export class Steps {
  #all = [];
  #listed = new Map();
  range = Infinity;

  replace(steps) {
    this.#all = [...steps].sort((a, b) => a.step - b.step);
    this.#listed = new Map(this.#all.map((step) => [step.step, step]));
  }

  /** One more. */
  put(step) {
    if (this.#listed.has(step.step)) return;
    const last = this.#all.at(-1);
    this.#all.push(step);
    this.#listed.set(step.step, step);
    if (last && step.step < last.step) this.#all.sort((a, b) => a.step - b.step);
    if (this.#all.length > MOST) this.#thin();
  }

  /** Where its time went is known some moments after the step. */
  putParts(number, parts) {
    const step = this.#listed.get(number);
    if (step) step.parts = parts;
  }

  #thin() {
    const kept = MOST / 3; // the latest stay whole
    const old = this.#all.slice(0, -kept).filter((_, index) => index % 2 === 0);
    this.replace([...old, ...this.#all.slice(-kept)]);
  }

  get last() {
    return this.#all.at(-1) ?? null;
  }

  get size() {
    return this.#all.length;
  }

  /** What charts show. */
  inView() {
    const first = (this.last?.step ?? 0) - this.range + 1;
    return this.range === Infinity ? this.#all : this.#all.filter((step) => step.step >= first);
  }

  /** The latest so many that have parts. */
  latestWithParts(most) {
    const found = [];
    for (let at = this.#all.length - 1; at >= 0 && found.length < most; at--) {
      if (this.#all[at].parts) found.push(this.#all[at]);
    }
    return found;
  }

  /** The step with this number, or the nearest that is kept. */
  nearest(number, shown = this.#all) {
    if (!shown.length) return null;
    let [low, high] = [0, shown.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (shown[middle].step < number) low = middle + 1;
      else high = middle;
    }
    const before = shown[low - 1];
    return before && number - before.step < shown[low].step - number ? before : shown[low];
  }
}

/** Round numbers between the two, in steps of 1, 2 or 5 times a power of ten. */
export function ticks(low, high, about = 4) {
  if (!(high > low)) return [low];
  const rough = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step);
  return found.length ? found : [low];
}

/** The same for whole numbers. */
export const wholeTicks = (low, high, about) => [...new Set(ticks(low, high, about).filter(Number.isInteger))];

export function scale(from, to, low, high) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

/** Steps gathered by pixel columns: {from, to, steps}; as many as there are steps where they are wide enough. */
export function bins(steps, width, least = 1.5) {
  if (!steps.length) return [];
  const most = Math.max(1, Math.floor(width / least));
  if (steps.length <= most) return steps.map((step) => ({ from: step.step, to: step.step, steps: [step] }));
  const [first, last] = [steps[0].step, steps.at(-1).step];
  const found = new Map();
  for (const step of steps) {
    const at = Math.min(most - 1, Math.floor(((step.step - first) / (last - first + 1)) * most));
    const bin = found.get(at);
    if (bin) {
      bin.to = step.step;
      bin.steps.push(step);
    } else found.set(at, { from: step.step, to: step.step, steps: [step] });
  }
  return [...found.values()];
}

export function quantile(values, part) {
  const sorted = values.filter(isNumber).sort((a, b) => a - b);
  if (!sorted.length) return null;
  const at = (sorted.length - 1) * part;
  const [low, high] = [sorted[Math.floor(at)], sorted[Math.ceil(at)]];
  return low + (high - low) * (at - Math.floor(at));
}
