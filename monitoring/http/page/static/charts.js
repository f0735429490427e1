// Charts over steps: a line, and a stack of parts. All of them share one cursor, by pointer or arrow keys.

import { bins, quantile, scale, ticks, wholeTicks } from "./series.js";
import { byId, isNumber, sum, svg, write } from "./text.js";

const EDGE = { left: 46, right: 10, top: 10, bottom: 20 };

/** The step that is looked at; null: the latest. */
export class Cursor {
  step = null;
  #listeners = [];

  listen(listener) {
    this.#listeners.push(listener);
  }

  set(step) {
    if (this.step === step) return;
    this.step = step;
    for (const listener of this.#listeners) listener(step);
  }
}

class Chart {
  constructor(host, title, steps, cursor) {
    Object.assign(this, { host, title, steps, cursor });
    this.root = svg("svg", { role: "img", tabindex: 0, "aria-label": title });
    this.plot = svg("g");
    this.mark = svg("g", { class: "cursor" });
    this.root.append(this.plot, this.mark);
    this.host.append(this.root);
    this.root.addEventListener("pointermove", (event) => this.#point(event));
    this.root.addEventListener("pointerleave", () => this.cursor.set(null));
    this.root.addEventListener("keydown", (event) => this.#key(event));
    this.root.addEventListener("blur", () => this.cursor.set(null));
    cursor.listen(() => this.drawCursor());
    new ResizeObserver(() => this.draw()).observe(host);
  }

  draw() {
    this.width = this.host.clientWidth;
    this.height = this.host.clientHeight;
    if (!this.width || !this.height) return;
    this.root.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.shown = this.steps.inView();
    const [first, last] = this.shown.length ? [this.shown[0].step, this.shown.at(-1).step] : [0, 1];
    this.x = scale(EDGE.left, this.width - EDGE.right, first - 0.5, last + 0.5);
    this.plot.replaceChildren();
    if (this.shown.length) this.drawPlot(first, last);
    else this.plot.append(svg("text", { x: this.width / 2, y: this.height / 2, "text-anchor": "middle", class: "lane-name" }, "waiting for the first step"));
    this.drawCursor();
  }

  axis(low, high, first, last, format) {
    this.y = scale(this.height - EDGE.bottom, EDGE.top, low, high);
    const group = svg("g", { class: "axis" });
    for (const tick of ticks(low, high, 5)) {
      const y = this.y(tick);
      group.append(
        svg("line", { x1: EDGE.left, x2: this.width - EDGE.right, y1: y, y2: y }),
        svg("text", { x: EDGE.left - 6, y: y + 3.5, "text-anchor": "end" }, format(tick)),
      );
    }
    const most = Math.max(2, Math.floor(this.width / 110));
    for (const tick of wholeTicks(first, last, most)) {
      group.append(svg("text", { x: this.x(tick), y: this.height - 5, "text-anchor": "middle" }, String(tick)));
    }
    this.plot.append(group);
  }

  drawCursor() {
    this.mark.replaceChildren();
    const step = this.cursor.step === null ? null : this.steps.nearest(this.cursor.step, this.shown ?? []);
    if (step && this.x && this.y) {
      const x = this.x(step.step);
      this.mark.append(svg("line", { x1: x, x2: x, y1: EDGE.top, y2: this.height - EDGE.bottom }));
      this.markStep(step, x);
    }
    if (step && document.activeElement === this.root) write(byId("spoken"), `step ${step.step}: ${this.say(step)}`);
  }

  label(x, text) {
    const right = x > this.width / 2;
    const place = { x: x + (right ? -7 : 7), y: EDGE.top + 10, "text-anchor": right ? "end" : "start", class: "label" };
    this.mark.append(svg("text", place, text));
  }

  #point(event) {
    if (!this.shown?.length) return;
    const box = this.root.getBoundingClientRect();
    const part = (event.clientX - box.left - EDGE.left) / (box.width - EDGE.left - EDGE.right);
    const [first, last] = [this.shown[0].step, this.shown.at(-1).step];
    this.cursor.set(this.steps.nearest(first - 0.5 + Math.min(1, Math.max(0, part)) * (last - first + 1), this.shown).step);
  }

  #key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.cursor.set(null);
    if (move === undefined || !this.shown?.length) return;
    event.preventDefault();
    const now = this.cursor.step === null ? this.shown.length - 1 : this.shown.indexOf(this.steps.nearest(this.cursor.step, this.shown));
    const at = Math.min(this.shown.length - 1, Math.max(0, now + (this.cursor.step === null && move < 0 ? 0 : move)));
    this.cursor.set(this.shown[at].step);
  }
}

/** One number a step. Where steps are narrower than a pixel, their mean, and the spread behind it. */
export class LineChart extends Chart {
  constructor(host, title, steps, cursor, { value, format, tick, fromZero = false }) {
    super(host, title, steps, cursor);
    Object.assign(this, { value, format, tick, fromZero });
  }

  say(step) {
    const value = this.value(step);
    return isNumber(value) ? this.format(value) : "not a number";
  }

  drawPlot(first, last) {
    const gathered = bins(this.shown, this.width - EDGE.left - EDGE.right);
    const points = gathered.map((bin) => this.#point(bin));
    const finite = points.filter((point) => point.mean !== null);
    let [low, high] = [Math.min(...finite.map((point) => point.low)), Math.max(...finite.map((point) => point.high))];
    if (!finite.length) [low, high] = [0, 1];
    if (this.fromZero) low = Math.min(0, low);
    const air = (high - low || Math.abs(high) || 1) * 0.06;
    this.axis(this.fromZero ? low : low - air, high + air, first, last, this.tick);
    this.#drawSpread(finite);
    this.plot.append(svg("path", { class: "curve", d: this.#path(points) }));
    if (finite.length === 1) this.plot.append(svg("circle", { cx: finite[0].x, cy: this.y(finite[0].mean), r: 2.5, class: "kind-F" }));
    for (const point of points) {
      if (point.broken) this.plot.append(svg("rect", { class: "broken", x: point.x - 1, y: this.height - EDGE.bottom - 6, width: 2, height: 6 }));
    }
    this.root.setAttribute("aria-label", `${this.title}, steps ${first} to ${last}; latest ${this.say(this.shown.at(-1))}`);
  }

  #point(bin) {
    const values = bin.steps.map(this.value).filter(isNumber);
    const x = this.x((bin.from + bin.to) / 2);
    if (!values.length) return { x, mean: null, broken: true };
    return { x, mean: sum(values) / values.length, low: Math.min(...values), high: Math.max(...values), broken: values.length < bin.steps.length };
  }

  #drawSpread(points) {
    if (!points.some((point) => point.high > point.low)) return;
    const up = points.map((point) => `${point.x.toFixed(1)},${this.y(point.high).toFixed(1)}`);
    const down = points.map((point) => `${point.x.toFixed(1)},${this.y(point.low).toFixed(1)}`).reverse();
    this.plot.append(svg("polygon", { class: "spread", points: [...up, ...down].join(" ") }));
  }

  #path(points) {
    let [path, drawing] = ["", false];
    for (const point of points) {
      if (point.mean !== null) path += `${drawing ? "L" : "M"}${point.x.toFixed(1)} ${this.y(point.mean).toFixed(1)}`;
      drawing = point.mean !== null;
    }
    return path;
  }

  markStep(step, x) {
    const value = this.value(step);
    if (isNumber(value)) this.mark.append(svg("circle", { cx: x, cy: this.y(value), r: 3.5 }));
    this.label(x, `step ${step.step}  ${this.say(step)}`);
  }
}

/** The parts of each step, one on the other: as shares, or in milliseconds. */
export class StackChart extends Chart {
  asShares = true;
  bright = null;

  constructor(host, title, steps, cursor, format) {
    super(host, title, steps, cursor);
    this.names = [];
    this.format = format;
  }

  say(step) {
    if (!step.parts) return "its parts are not known";
    const total = sum(Object.values(step.parts)) || 1;
    const largest = [...this.names].sort((a, b) => step.parts[b] - step.parts[a]).slice(0, 3);
    return largest.map((name) => `${name} ${((100 * step.parts[name]) / total).toFixed(1)} %`).join(", ");
  }

  drawPlot(first, last) {
    const gathered = bins(this.shown.filter((step) => step.parts), this.width - EDGE.left - EDGE.right, 2.5);
    const columns = gathered.map((bin) => this.#column(bin));
    // A first step that loads libraries would press all others flat.
    const high = this.asShares ? 1 : Math.min(Math.max(...columns.map((c) => c.total), 0), 1.6 * (quantile(columns.map((c) => c.total), 0.95) ?? 1)) || 1;
    this.axis(0, high, first, last, this.asShares ? (share) => `${Math.round(100 * share)} %` : (value) => this.format(value));
    const floor = columns.map(() => 0);
    for (const name of this.names) {
      const kind = this.bright !== null && this.bright !== name ? "area dim" : "area";
      const area = svg("path", { class: kind, d: this.#area(columns, floor, name, high) });
      area.style.fill = `var(--part-${name})`;
      this.plot.append(area);
    }
    this.root.setAttribute("aria-label", `${this.title}, steps ${first} to ${last}; latest: ${this.say(this.shown.at(-1))}`);
  }

  #column(bin) {
    const parts = Object.fromEntries(this.names.map((name) => [name, sum(bin.steps.map((step) => step.parts[name])) / bin.steps.length]));
    return { from: bin.from, to: bin.to, parts, total: sum(Object.values(parts)) };
  }

  #area(columns, floor, name, high) {
    return columns.map((column, at) => {
      const size = this.asShares ? column.parts[name] / (column.total || 1) : column.parts[name];
      const [low, top] = [floor[at], floor[at] + size];
      floor[at] = top;
      if (size <= 0 || low >= high) return "";
      // Columns touch where nothing lies between their steps.
      const next = columns[at + 1];
      const right = next && next.from - column.to > 1 && columns.length > 2 ? next.from - 0.5 : column.to + 0.5;
      const [x0, x1] = [this.x(column.from - 0.5), this.x(right) + 0.15];
      const [y0, y1] = [this.y(low), this.y(Math.min(top, high))];
      return `M${x0.toFixed(2)} ${y0.toFixed(2)}V${y1.toFixed(2)}H${x1.toFixed(2)}V${y0.toFixed(2)}Z`;
    }).join("");
  }

  markStep() {} // the table beside it tells
}
