// The mesh as a grid: a block a replica, tensor-parallel ranks below each other, stages from left to right.

import { bytes, byId, count, el, isNumber, percent, rankName, seconds, sum, write } from "./text.js";

const SLOW = 0.67; // below this a rank is called a straggler
const FULL = 0.9; // what differs less is noise
const MOST_CELLS = 16384; // more can't be seen, nor drawn in time; a folder may say anything

/** From calm to alarming; the score is own speed over the best. */
export function colourOf(score) {
  const part = Math.min(1, Math.max(0, (FULL - score) / (FULL - SLOW)));
  const [from, to, share] = part < 0.5 ? ["good", "fair", 2 * part] : ["fair", "bad", 2 * part - 1];
  return `color-mix(in oklab, var(--score-${to}) ${Math.round(100 * share)}%, var(--score-${from}))`;
}

export class MeshGrid {
  #cells = new Map();
  #shape = "";
  #chosen = 0;
  #isPicked = false; // by somebody; before, the slowest rank is shown
  #looked = null;

  constructor(parts) {
    this.parts = parts;
    this.host = byId("mesh");
    this.host.addEventListener("keydown", (event) => this.#key(event));
    const band = el("i");
    band.style.background = `linear-gradient(to right, ${[SLOW, (SLOW + FULL) / 2, FULL].map(colourOf).join(", ")})`;
    byId("mesh-legend").append("straggler ≤ 0.67", band, "full speed");
  }

  draw(run, ranks) {
    const mesh = run.mesh ?? { dp: 1, tp: 1, pp: 1 };
    this.ranks = new Map(ranks.map((rank) => [rank.rank, rank]));
    const shape = JSON.stringify([mesh, ranks.map((rank) => [rank.rank, rank.coords])]);
    if (shape !== this.#shape) {
      this.#shape = shape;
      this.#build(mesh, ranks);
    }
    for (const rank of ranks) this.#paint(rank);
    if (!this.#isPicked) this.#choose(slowest(ranks));
    const slow = ranks.filter((rank) => isNumber(rank.straggler_score) && rank.straggler_score < SLOW).length;
    write(byId("mesh-facts"), `${count(ranks.length)} ranks, dp ${mesh.dp} × tp ${mesh.tp} × pp ${mesh.pp}${slow ? `, ${slow} slow` : ""}`);
    if (this.#isPicked) this.#tell(this.#looked ?? this.#chosen);
  }

  #build(mesh, ranks) {
    this.mesh = mesh;
    this.#cells.clear();
    this.host.replaceChildren();
    this.host.classList.toggle("dense", mesh.pp > 12 || ranks.length > 96);
    if (mesh.dp * mesh.tp * mesh.pp > MOST_CELLS) {
      this.host.append(el("p", { class: "empty" }, "too many ranks to be drawn"));
      return;
    }
    const at = new Map(ranks.filter((rank) => rank.coords).map(({ rank, coords: c }) => [`${c.dp},${c.tp},${c.pp}`, rank]));
    for (let dp = 0; dp < mesh.dp; dp++) this.host.append(this.#replica(mesh, dp, at));
    if (!this.#cells.has(this.#chosen)) this.#chosen = this.#cells.keys().next().value ?? 0;
    this.#cells.get(this.#chosen)?.setAttribute("tabindex", "0");
  }

  #replica(mesh, dp, at) {
    const cells = el("div", { class: "cells", role: "rowgroup" });
    cells.style.gridTemplateColumns = `34px repeat(${mesh.pp}, minmax(12px, 1fr))`;
    if (dp === 0) {
      cells.append(el("span"));
      for (let pp = 0; pp < mesh.pp; pp++) cells.append(el("span", { class: "pp-name", "aria-hidden": "true" }, `pp ${pp}`));
    }
    for (let tp = 0; tp < mesh.tp; tp++) {
      const row = el("div", { role: "row" });
      row.style.display = "contents";
      row.append(el("span", { class: "tp-name", "aria-hidden": "true" }, `tp ${tp}`));
      for (let pp = 0; pp < mesh.pp; pp++) row.append(this.#cell(at.get(`${dp},${tp},${pp}`)));
      cells.append(row);
    }
    return el("div", { class: "replica", role: "presentation" }, el("span", { class: "name" }, `dp ${dp}`), cells);
  }

  #cell(rank) {
    if (rank === undefined) return el("span", { class: "cell unknown", role: "gridcell" }, "–");
    const look = (at) => () => {
      this.#looked = at;
      this.#tell(at ?? this.#chosen);
    };
    const cell = el("button", {
      type: "button", class: "cell", role: "gridcell", tabindex: -1, "data-rank": rank,
      onpointerenter: look(rank), onpointerleave: look(null), onfocus: () => this.#pick(rank), onclick: () => this.#pick(rank),
    }, el("b", {}, String(rank)), el("small"));
    this.#cells.set(rank, cell);
    return cell;
  }

  #paint(rank) {
    const cell = this.#cells.get(rank.rank);
    if (!cell) return;
    const score = rank.straggler_score;
    const known = isNumber(score);
    cell.classList.toggle("unknown", !known);
    cell.classList.toggle("straggler", known && score < SLOW);
    cell.style.background = known ? colourOf(score) : "";
    write(cell.lastChild, known ? score.toFixed(2) : "–");
    cell.setAttribute("aria-label", `${rankName(rank)}, ${known ? `score ${score.toFixed(2)}` : "no score yet"}${known && score < SLOW ? ", straggler" : ""}`);
  }

  #pick(rank) {
    this.#isPicked = true;
    this.#choose(rank);
  }

  #choose(rank) {
    this.#cells.get(this.#chosen)?.setAttribute("tabindex", "-1");
    this.#chosen = rank;
    this.#cells.get(rank)?.setAttribute("tabindex", "0");
    this.#tell(this.#looked ?? rank);
  }

  #key(event) {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const here = this.ranks.get(this.#chosen)?.coords;
    if (!move || !here) return;
    event.preventDefault();
    const rows = this.mesh.dp * this.mesh.tp;
    const row = Math.min(rows - 1, Math.max(0, here.dp * this.mesh.tp + here.tp + move[0]));
    const pp = Math.min(this.mesh.pp - 1, Math.max(0, here.pp + move[1]));
    const [dp, tp] = [Math.floor(row / this.mesh.tp), row % this.mesh.tp];
    for (const { rank, coords: c } of this.ranks.values()) {
      if (c && c.dp === dp && c.tp === tp && c.pp === pp) this.#cells.get(rank)?.focus();
    }
  }

  /** What is known of one rank. */
  #tell(number) {
    const rank = this.ranks?.get(number);
    for (const [each, cell] of this.#cells) cell.setAttribute("aria-selected", String(each === number));
    if (!rank) return;
    const score = rank.straggler_score;
    const parts = rank.seconds ?? {};
    const total = sum(Object.values(parts)) || 1;
    const bar = el("div", { class: "stackbar", "aria-hidden": "true" });
    for (const name of this.parts) {
      const piece = el("i", { title: `${name} ${percent(parts[name] / total)}` });
      piece.style.width = `${(100 * (parts[name] ?? 0)) / total}%`;
      piece.style.background = `var(--part-${name})`;
      bar.append(piece);
    }
    const largest = this.parts.filter((name) => parts[name] > 0).sort((a, b) => parts[b] - parts[a]).slice(0, 4);
    const rows = [
      ["score", isNumber(score) ? score.toFixed(3) : "–"],
      ...largest.map((name) => [name, percent(parts[name] / total)]),
      ["bubble of pipeline", percent(rank.bubble)],
      ["memory", bytes(rank.memory_bytes)],
      ...Object.entries(rank.memory_kinds ?? {}).filter(([kind]) => kind !== "process").map(([kind, size]) => [`· ${kind}`, bytes(size)]),
      ["parameters", count(rank.parameters)],
      ["processor time", seconds(rank.compute_cpu_seconds)],
      ["waited for a core", seconds(rank.core_wait_seconds)],
      ["unattributed", seconds(rank.remainder_seconds)],
    ];
    byId("rank").replaceChildren(
      el("h3", {}, rankName(rank)),
      el("p", { class: "unit" }, [rank.host, rank.device].filter(Boolean).join(" · "), isNumber(score) && score < SLOW ? el("span", { class: "tag" }, "  straggler") : null),
      bar,
      el("dl", {}, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    );
  }
}

function slowest(ranks) {
  const known = ranks.filter((rank) => isNumber(rank.straggler_score));
  const least = known.reduce((worst, rank) => (rank.straggler_score < worst.straggler_score ? rank : worst), known[0] ?? ranks[0]);
  return least?.rank ?? 0;
}
