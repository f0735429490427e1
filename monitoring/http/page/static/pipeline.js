// The last step's pipeline: as planned above, as measured below, on one axis of time; a lane a pipeline rank.

import { scale, ticks } from "./series.js";
import { byId, el, largest, percent, seconds, svg, trim, write } from "./text.js";

const LEFT = 44, RIGHT = 12, LANE = 22, GAP = 3, HEAD = 22, AXIS = 20;
const MEANINGS = { F: "forward", B: "backward", I: "backward, input part", W: "backward, weight part" };
const ACTION = /^(\d+)(F|B|I|W)(\d+)$/;
const LATE = /^rank \d+: (\S+) came/; // as a comparison of the two tells it
const LIGHTEST = 0.62; // white in the last stage's shade

function parse(span) {
  const found = ACTION.exec(span.action);
  return found ? { ...span, stage: Number(found[1]), kind: found[2], microbatch: Number(found[3]) } : null;
}

export class Pipeline {
  #places = new Map();
  #shown = null;
  #held = false;
  #latest = null;

  constructor() {
    this.host = byId("pipeline");
    this.root = svg("svg", { role: "img", tabindex: 0, "aria-label": "Pipeline of the last step" });
    this.root.addEventListener("pointermove", (event) => this.#point(event));
    this.root.addEventListener("pointerenter", () => { this.#held = true; });
    this.root.addEventListener("pointerleave", () => this.#release());
    this.root.addEventListener("blur", () => this.#release());
    this.root.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#paint()).observe(this.host);
  }

  /** While somebody looks at an action, the step stays. */
  draw(pipeline) {
    this.#latest = pipeline;
    if (this.#held) return;
    const same = this.#shown && pipeline && this.#shown.step === pipeline.step;
    this.#shown = pipeline;
    if (!same) this.#paint();
  }

  #release() {
    this.#held = false;
    this.#choose(null);
    this.draw(this.#latest);
  }

  #paint() {
    const shown = this.#shown;
    if (!shown) {
      this.host.replaceChildren(el("p", { class: "empty" }, "no step is measured yet"));
      return;
    }
    const measured = shown.measured.map((lane) => lane.map(parse).filter(Boolean));
    const planned = (shown.planned ?? []).map((lane) => lane.map(parse).filter(Boolean));
    this.end = largest([...planned, ...measured].flat().map((span) => span.end), 1e-9);
    this.width = Math.max(320, this.host.clientWidth);
    this.x = scale(LEFT, this.width - RIGHT, 0, this.end);
    this.#places.clear();
    this.root.replaceChildren();
    let top = 0;
    const ratio = shown.bubble_ratio ?? {};
    if (planned.length) top = this.#group("planned", planned, ratio.planned, top) + 6;
    top = this.#group("measured", measured, ratio.measured, top);
    this.#axis(top);
    this.#late(shown.first_late);
    this.marks = svg("g");
    this.root.append(this.marks);
    const height = top + AXIS;
    this.root.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
    this.root.style.height = `${height}px`;
    if (this.root.parentNode !== this.host) this.host.replaceChildren(this.root);
    this.#tell(shown, [...planned, ...measured].flat());
  }

  #group(name, lanes, bubble, top) {
    const end = largest(lanes.flat().map((span) => span.end));
    const fact = `${seconds(end)}, bubble ${percent(bubble)}`;
    this.root.append(
      svg("text", { class: "row-name", x: 0, y: top + 14 }, name),
      svg("text", { class: "row-fact", x: 74, y: top + 14, "data-bubble": name }, fact),
    );
    top += HEAD;
    lanes.forEach((lane, rank) => {
      this.#lane(name, lane, rank, top);
      top += LANE + GAP;
    });
    const x = this.x(end);
    this.root.append(svg("line", { class: "end-line", x1: x, x2: x, y1: top - lanes.length * (LANE + GAP) - 2, y2: top }));
    return top;
  }

  /** One path a colour, so that thousands of actions cost little. */
  #lane(row, lane, rank, top) {
    this.root.append(
      svg("text", { class: "lane-name", x: 0, y: top + 15 }, `pp ${rank}`),
      svg("rect", { class: "lane", x: LEFT, y: top, width: this.width - RIGHT - LEFT, height: LANE, rx: 2 }),
    );
    const stages = [...new Set(lane.map((span) => span.stage))].sort((a, b) => a - b);
    const paths = new Map();
    const names = [];
    for (const span of lane) {
      const [x0, x1] = [this.x(span.start), this.x(span.end)];
      const width = Math.max(0.6, x1 - x0 - (x1 - x0 > 4 ? 1 : 0));
      const key = `${span.kind} ${stages.indexOf(span.stage)}`;
      paths.set(key, `${paths.get(key) ?? ""}M${x0.toFixed(2)} ${top}h${width.toFixed(2)}v${LANE}h${(-width).toFixed(2)}Z`);
      if (width > 7 * span.action.length + 3) names.push(svg("text", { class: "box-name", x: x0 + width / 2, y: top + 15, "text-anchor": "middle" }, span.action));
      this.#places.set(`${row} ${span.action}`, { row, rank, span, x: x0, y: top, width });
    }
    for (const [key, d] of paths) {
      const [kind, place] = key.split(" ");
      const path = svg("path", { class: `kind-${kind}`, d });
      if (Number(place)) path.style.fill = `color-mix(in srgb, white ${Math.round((100 * LIGHTEST * place) / (stages.length - 1))}%, var(--kind-${kind}))`;
      this.root.append(path);
    }
    this.root.append(...names);
  }

  #axis(top) {
    const group = svg("g", { class: "axis" });
    for (const tick of ticks(0, this.end * 1e3, Math.max(2, Math.floor(this.width / 130)))) {
      group.append(svg("text", { x: this.x(tick / 1e3), y: top + 13, "text-anchor": "middle" }, `${trim(tick, tick < 10 ? 2 : 3).replace(/\.0+$/, "")}${tick ? "" : " ms"}`));
    }
    this.root.append(group);
  }

  #late(late) {
    const action = LATE.exec(late ?? "")?.[1];
    const place = action && this.#places.get(`measured ${action}`);
    if (place) this.root.append(svg("rect", { class: "late", x: place.x, y: place.y + 1, width: Math.max(3, place.width), height: LANE - 2, rx: 2 }));
  }

  #tell(shown, spans) {
    const kinds = [...new Set(spans.map((span) => span.kind))];
    byId("pipeline-legend").replaceChildren(...["F", "B", "I", "W"].filter((kind) => kinds.includes(kind)).map((kind) =>
      el("span", {}, svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("rect", { class: `kind-${kind}`, width: 10, height: 10, rx: 2 })), `${kind} ${MEANINGS[kind]}`)));
    const stages = `${shown.stages} stage${shown.stages === 1 ? "" : "s"}, ${shown.microbatches} microbatch${shown.microbatches === 1 ? "" : "es"}`;
    write(byId("pipeline-facts"), `${shown.step === null || shown.step === undefined ? "" : `step ${shown.step} · `}${shown.schedule} · ${stages}`);
    this.#note();
    const ratio = shown.bubble_ratio ?? {};
    this.root.setAttribute("aria-label", `Pipeline of step ${shown.step}: bubble planned ${percent(ratio.planned)}, measured ${percent(ratio.measured)}. Arrow keys go through its actions.`);
  }

  #note() {
    const late = this.#shown?.first_late;
    if (!late) return byId("pipeline-note").replaceChildren("planned with what each stage's actions took on average; nothing came late");
    return byId("pipeline-note").replaceChildren("first late: ", el("b", {}, late));
  }

  #point(event) {
    const box = this.root.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left) * (this.width / box.width), event.clientY - box.top];
    for (const place of this.#places.values()) {
      if (y >= place.y && y <= place.y + LANE && x >= place.x && x <= place.x + Math.max(2, place.width)) return this.#choose(place);
    }
    return this.#choose(null);
  }

  #key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const lane = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (event.key === "Escape") return this.#release();
    if (!move && !lane) return undefined;
    event.preventDefault();
    this.#held = true;
    const places = [...this.#places.values()].filter((place) => place.row === "measured");
    const now = this.chosen && places.find((place) => place.span.action === this.chosen.span.action);
    if (!now) return this.#choose(places[0] ?? null, true);
    const rank = now.rank + (lane ?? 0);
    const row = places.filter((place) => place.rank === rank);
    if (lane) return this.#choose(row.find((place) => place.span.end > now.span.start) ?? row.at(-1) ?? now, true);
    return this.#choose(row[Math.min(row.length - 1, Math.max(0, row.indexOf(now) + move))], true);
  }

  /** The action in both rows, and its times. */
  #choose(place, spoken = false) {
    if (!this.marks || this.chosen === place) return;
    this.chosen = place;
    this.marks.replaceChildren();
    if (!place) {
      this.#note();
      return;
    }
    const { action, kind, stage, microbatch } = place.span;
    const times = ["planned", "measured"].map((row) => {
      const at = this.#places.get(`${row} ${action}`);
      if (!at) return null;
      this.marks.append(svg("rect", { class: "chosen", x: at.x, y: at.y, width: Math.max(2, at.width), height: LANE, rx: 2 }));
      return `${row} ${seconds(at.span.start)} to ${seconds(at.span.end)} (${seconds(at.span.end - at.span.start)})`;
    }).filter(Boolean).join("; ");
    byId("pipeline-note").replaceChildren(el("b", {}, action), ` stage ${stage}, ${MEANINGS[kind]}, microbatch ${microbatch}, pp ${place.rank}: ${times}`);
    if (spoken) write(byId("spoken"), `${action}: ${times}`);
  }
}
