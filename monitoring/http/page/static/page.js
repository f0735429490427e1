// The page: loads the run, follows its stream, and draws what changed at most five times a second.

import { Bottlenecks } from "./bottlenecks.js";
import { Cursor, LineChart, StackChart } from "./charts.js";
import { Log } from "./log.js";
import { MeshGrid } from "./mesh.js";
import { Overview } from "./overview.js";
import { Pipeline } from "./pipeline.js";
import { Steps } from "./series.js";
import { brief, byId, compact, count, el, seconds, trim, write } from "./text.js";

const PACE = 200; // milliseconds between two drawings
const AGAIN = 2000; // until the next attempt to load

class Page {
  constructor(snapshot) {
    this.steps = new Steps();
    this.reloads = new Set(); // each under way: what was told meanwhile
    const cursor = (this.cursor = new Cursor());
    this.overview = new Overview(snapshot.parts, this.steps, cursor, (name) => this.#light(name));
    this.log = new Log();
    this.mesh = new MeshGrid(Object.keys(snapshot.parts));
    this.pipeline = new Pipeline();
    this.bottlenecks = new Bottlenecks();
    this.stack = new StackChart(byId("stack"), "Parts of each step", this.steps, cursor, (value) => (value ? seconds(value, 3).replace(/\.0+ /, " ") : "0"));
    this.stack.names = Object.keys(snapshot.parts);
    this.loss = new LineChart(byId("loss"), "Loss", this.steps, cursor, {
      value: (step) => step.loss, format: (value) => trim(value, 5), tick: brief,
    });
    this.throughput = new LineChart(byId("throughput"), "Tokens a second", this.steps, cursor, {
      value: (step) => (step.seconds > 0 ? step.tokens / step.seconds : null), format: count, tick: compact, fromZero: true,
    });
    this.charts = [this.stack, this.loss, this.throughput];
    cursor.listen(() => this.#values());
    choice("time-scale", [["share", true], ["time", false]], (shares) => {
      this.stack.asShares = shares;
      this.stack.draw();
    });
    choice("range", [["all steps", Infinity], ["last 500", 500], ["last 100", 100]], (range) => {
      this.steps.range = range;
      this.changed();
    });
    this.load(snapshot);
  }

  load(snapshot) {
    this.state = snapshot;
    this.loaded = messageNumber(snapshot.last_id);
    this.steps.replace(snapshot.steps);
    this.log.replace(snapshot.log ?? []);
    this.changed();
  }

  changed() {
    if (this.waits) return;
    this.waits = true;
    const since = performance.now() - (this.drawn ?? -PACE);
    setTimeout(() => requestAnimationFrame(() => this.draw()), Math.max(0, PACE - since));
  }

  draw() {
    this.waits = false;
    this.drawn = performance.now();
    const { run, ranks, bottlenecks, pipeline } = this.state;
    this.overview.draw(this.state);
    for (const chart of this.charts) chart.draw();
    this.mesh.draw(run, ranks);
    this.bottlenecks.draw(bottlenecks ?? [], run, this.steps.size);
    byId("pipeline-panel").hidden = run.mesh?.pp === 1;
    this.pipeline.draw(pipeline);
    this.log.draw();
    this.#values();
    document.body.dataset.drawnStep = String(this.steps.last?.step ?? -1);
  }

  #values() {
    const step = this.cursor.step === null ? this.steps.last : this.steps.nearest(this.cursor.step);
    for (const [id, chart] of [["loss", this.loss], ["throughput", this.throughput]]) {
      byId(`${id}-value`).replaceChildren(...(step ? [el("span", { class: "unit" }, `step ${step.step}`), " ", el("b", {}, chart.say(step))] : []));
    }
  }

  #light(name) {
    this.stack.bright = name;
    this.stack.draw();
  }
}

/** A row of buttons of which one is pressed. */
function choice(id, options, onChange) {
  const buttons = options.map(([name, value]) => el("button", { type: "button", "aria-pressed": "false", onclick: () => press(name, value) }, name));
  const press = (name, value) => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.textContent === name));
    onChange(value);
  };
  buttons[0].setAttribute("aria-pressed", "true");
  byId(id).append(...buttons);
}

// The connection.

/** A message's, within its feed. */
const messageNumber = (id) => Number(String(id).split("-")[1]);

function say(text, isLost = false) {
  const node = byId("connection");
  node.className = isLost ? "connection lost" : "connection";
  write(node, text);
}

async function fetchRun() {
  const answer = await fetch("api/run", { cache: "no-store" });
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return answer.json();
}

/** What the stream tells while the snapshot is on its way is told again once that is there, unless it is in it. */
async function reload(page) {
  const meanwhile = [];
  page.reloads.add(meanwhile);
  try {
    page.load(await fetchRun());
    for (const again of meanwhile) again();
  } catch {
    setTimeout(() => reload(page), AGAIN);
  } finally {
    page.reloads.delete(meanwhile);
  }
}

function follow(page, lastId) {
  const stream = new EventSource(`api/stream?after=${encodeURIComponent(lastId)}`);
  const on = (kind, take) => stream.addEventListener(kind, (event) => {
    if (event.lastEventId) lastId = event.lastEventId;
    const number = messageNumber(lastId);
    const tell = () => {
      take(JSON.parse(event.data), number);
      page.changed();
    };
    tell();
    if (kind === "reset") return;
    // A state has no number of its own: it may be newer than what was loaded after the same message.
    const isNews = () => (kind === "state" ? number >= page.loaded : number > page.loaded);
    for (const meanwhile of page.reloads) meanwhile.push(() => { if (isNews()) tell(); });
  });
  stream.addEventListener("open", () => say("live"));
  on("step", (step) => page.steps.put(step));
  on("parts", ({ step, parts }) => page.steps.putParts(step, parts));
  on("log", (line, number) => { // unless it came with what was loaded meanwhile
    if (!(number <= page.loaded)) page.log.put(line);
  });
  on("state", (state) => { page.state = { ...page.state, ...state }; });
  on("reset", () => reload(page));
  on("end", () => {
    stream.close();
    say("ended");
    byId("connection").title = "The run's server has closed; parallel3d view shows its folder.";
  });
  stream.addEventListener("error", () => {
    say("connection lost, trying again", true);
    if (stream.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
    setTimeout(() => follow(page, lastId), AGAIN);
  });
}

function themes() {
  const select = byId("theme");
  const apply = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    select.value = theme;
  };
  const kept = () => { try { return localStorage.getItem("parallel3d-theme"); } catch { return null; } };
  apply(["light", "dark"].includes(kept()) ? kept() : "auto");
  select.addEventListener("change", () => {
    apply(select.value);
    try { localStorage.setItem("parallel3d-theme", select.value); } catch { /* a browser that keeps nothing */ }
  });
}

async function main() {
  themes();
  let snapshot = null;
  while (snapshot === null) {
    try {
      snapshot = await fetchRun();
    } catch (error) {
      say(`can't load the run: ${error.message}`, true);
      await new Promise((resolve) => { setTimeout(resolve, AGAIN); });
    }
  }
  const page = new Page(snapshot);
  if (snapshot.live) follow(page, snapshot.last_id);
  else say("finished run");
}

main();
