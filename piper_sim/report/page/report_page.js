// The page: what is shown, and what hand and keys do to it.

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const wish = { comm: true, memory: true, paired: false, critical: false, stretch: 1, compute: data.compute };
const view = { t0: 0, t1: 1, hover: null, picked: null, cursor: null };
const strip = document.createElement("canvas");
const stripContext = strip.getContext("2d", { willReadFrequently: true }); // written by the processor: keep it there
const contexts = {};
let colours, scene, curves, drawn = false;

function size(name, width, height) {
  const canvas = $(name);
  const dpr = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * dpr), Math.round(height * dpr)];
  if (canvas.width !== w || canvas.height !== h) {
    [canvas.width, canvas.height] = [w, h];
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  contexts[name] = canvas.getContext("2d", { alpha: false });
  return dpr;
}

const gutterCss = () => (window.innerWidth < 700 ? 84 : 124);
const widthCss = () => Math.max(50, $("lanes").clientWidth - gutterCss());

function layout() {
  const room = Math.max(300, window.innerHeight * 0.72);
  scene = buildScene(view.runs, wish, room);
  const height = Math.min(scene.height, room);
  $("lanes").style.height = `${height}px`;
  const width = $("lanes").clientWidth;
  size("canvas", width, height);
  size("axis", width, 26);
  size("overview", width, 34);
  $("tall").style.height = `${Math.max(0, scene.height - height)}px`;
  curves = view.runs.map((r) => utilisation(r, scene.length, Math.round(widthCss()), data.compute));
  clampView();
  redraw();
}

function clampView() {
  const least = Math.max(scene.length * 1e-7, 1e-10);
  let length = Math.min(Math.max(view.t1 - view.t0, least), scene.length);
  view.t0 = Math.min(Math.max(0, view.t0), scene.length - length);
  view.t1 = view.t0 + length;
}

function redraw() {
  if (drawn) return;
  drawn = true;
  requestAnimationFrame(() => {
    drawn = false;
    paint();
  });
}

// Following a microbatch, or the critical path, takes the colour from all other rows.
function followed() {
  const { picked } = view;
  if (picked && picked.row >= 0) {
    const { run } = picked.track;
    const wanted = new Set(run.marks[run.op[picked.row]]);
    const step = run.step[picked.row];
    const has = data.runs.map(() => null);
    return (r, i) => {
      if (!wanted.size) return r !== run || i !== picked.row;
      const known = (has[r.index] ||= r.marks.map((m) => m.some((x) => wanted.has(x))));
      return !known[r.op[i]] || r.step[i] !== step;
    };
  }
  return wish.critical ? (r, i) => r.critical && !r.critical[i] : () => false;
}

function paint() {
  const ctx = contexts.canvas;
  const dpr = window.devicePixelRatio || 1;
  const [W, H] = [ctx.canvas.width, ctx.canvas.height];
  const gutter = Math.round(gutterCss() * dpr);
  const scale = (W - gutter) / (view.t1 - view.t0);
  const p = { ctx, W, H, dpr, gutter, scale, t0: view.t0, t1: view.t1, colours, strip, stripContext };
  p.isFaint = followed();
  p.memoryTop = scene.memoryTop;
  ctx.fillStyle = colours.card;
  ctx.fillRect(0, 0, W, H);
  const top = $("lanes").scrollTop;
  const marks = ticks(view.t0, view.t1, widthCss() / 110);
  ctx.fillStyle = colours.line;
  for (const [t] of marks) ctx.fillRect(Math.round(gutter + (t - view.t0) * scale), 0, 1, H);
  for (const track of scene.tracks) {
    const [y, h] = [Math.round((track.y - top) * dpr), Math.round(track.h * dpr)];
    if (y > H || y + h < 0) continue;
    if (track.kind === "memory") paintMemory(p, track, y, h);
    else if (track.kind !== "head") paintLane(p, track, y, h);
    paintGutter(p, track, y, h);
    for (const spot of [view.hover, view.picked])
      if (spot && spot.track.lane === track.lane && spot.track.run === track.run && spot.row >= 0) outline(p, spot, y, h);
  }
  ctx.fillStyle = colours.ink;
  for (const run of view.runs.slice(0, 1))
    for (const [, t] of run.steps.slice(1)) ctx.fillRect(gutter + (t - run.zero - view.t0) * scale, 0, dpr, H);
  if (view.cursor !== null) {
    ctx.fillStyle = colours.soft;
    ctx.fillRect(gutter + (view.cursor - view.t0) * scale, 0, 1, H);
  }
  paintAxis(contexts.axis, p, marks, view.cursor);
  paintOverview(contexts.overview, p, curves, scene.length);
}

function outline(p, spot, y, h) {
  const { run } = spot.track;
  const a = p.gutter + (run.start[spot.row] - run.zero - p.t0) * p.scale;
  const b = p.gutter + (run.end[spot.row] - run.zero - p.t0) * p.scale;
  p.ctx.strokeStyle = p.colours.ink;
  p.ctx.lineWidth = 2 * p.dpr;
  const left = Math.max(p.gutter, a);
  if (b > p.gutter) p.ctx.strokeRect(left, y + p.dpr, Math.max(2, b - left), h - 2 * p.dpr);
}

// --- words about an op ---

function facts({ track, row, bytes, time }) {
  const { run } = track;
  const where = `${track.rank}${view.runs.length > 1 ? ` of ${run.name}` : ""}`;
  if (row < 0) return [["rank", where], ["time", seconds(time + run.zero)], ["allocated", bytes === null ? "–" : bytesText(bytes)]];
  const found = [
    ["class", data.looks[run.look[row]].word],
    ["rank", where],
    ["stream", track.lane.stream],
    ["start", seconds(run.start[row], 9)],
    ["end", seconds(run.end[row], 9)],
    ["duration", seconds(run.end[row] - run.start[row])],
  ];
  if (run.wait[row] > 0) found.push(["posted", `${seconds(run.wait[row])} before`]);
  if (run.steps.length > 1) found.push(["step", String(run.step[row])]);
  if (run.waits && run.waits_texts[run.waits[row]]) found.push(["waits for", run.waits_texts[run.waits[row]]]);
  if (run.cost && run.cost_texts[run.cost[row]]) found.push(["cost", run.cost_texts[run.cost[row]]]);
  if (run.critical && run.critical[row]) found.push(["critical", "on the critical path"]);
  return found;
}

const nameOf = ({ track, row }) => (row < 0 ? "memory" : track.run.op_texts[track.run.op[row]]);

function showTip(spot, x, y) {
  const tip = $("tip");
  tip.hidden = !spot;
  if (!spot) return;
  const name = document.createElement("b");
  if (spot.row >= 0) {
    const chip = document.createElement("i");
    chip.style.background = colours.css[spot.track.run.look[spot.row]];
    name.append(chip);
  }
  name.append(nameOf(spot)); // append(text) makes a text node: an op's name is never markup
  const list = document.createElement("dl");
  for (const [key, value] of facts(spot)) {
    const [dt, dd] = [document.createElement("dt"), document.createElement("dd")];
    dt.textContent = key;
    dd.textContent = value;
    list.append(dt, dd);
  }
  tip.replaceChildren(name, list);
  tip.style.left = tip.style.top = "0"; // at an edge it would be measured squeezed
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, x + 16 + box.width > window.innerWidth ? x - box.width - 16 : x + 16)}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 16, window.innerHeight - box.height - 8))}px`;
}

function pick(spot) {
  view.picked = spot;
  $("said").textContent = spot ? [nameOf(spot), ...facts(spot).map(([k, v]) => `${k} ${v}`)].join(" · ") : "";
  redraw();
}

// --- moving ---

function zoom(factor, middle = (view.t0 + view.t1) / 2) {
  const length = Math.min(scene.length, (view.t1 - view.t0) * factor);
  const share = (middle - view.t0) / (view.t1 - view.t0);
  view.t0 = middle - share * length;
  view.t1 = view.t0 + length;
  clampView();
  redraw();
}

function pan(by) {
  const length = view.t1 - view.t0;
  view.t0 += by;
  view.t1 = view.t0 + length;
  clampView();
  redraw();
}

function fit() {
  [view.t0, view.t1] = [0, scene.length];
  clampView();
  redraw();
}

function stretch(factor) {
  wish.stretch = Math.min(8, Math.max(0.4, wish.stretch * factor));
  layout();
}

function place(event) {
  const box = $("lanes").getBoundingClientRect();
  const x = event.clientX - box.left - gutterCss();
  const t = view.t0 + (x / widthCss()) * (view.t1 - view.t0);
  return { x, t, y: event.clientY - box.top + $("lanes").scrollTop };
}

function spotAt(event) {
  const { x, t, y } = place(event);
  return x < 0 ? null : whatIsAt(scene, t, y, (3 * (view.t1 - view.t0)) / widthCss());
}

// The op before or behind the picked one in its lane, or the one nearest in the lane above or below.
function step(by) {
  const { picked } = view;
  if (!picked || picked.row < 0) return begin();
  const row = picked.row + by;
  if (row >= picked.track.lane.lo && row < picked.track.lane.hi) reveal({ track: picked.track, row });
}

function lane(by) {
  const { picked } = view;
  if (!picked || picked.row < 0) return begin();
  const { run } = picked.track;
  const t = (run.start[picked.row] + run.end[picked.row]) / 2 - run.zero;
  const tracks = scene.tracks.filter((k) => k.lane && k.lane.hi > k.lane.lo);
  const at = tracks.findIndex((k) => k.lane === picked.track.lane) + by;
  if (at < 0 || at >= tracks.length) return;
  const track = tracks[at];
  const row = Math.min(track.lane.hi - 1, firstVisible(track.run, track.lane, t + track.run.zero));
  reveal({ track, row });
}

function begin() {
  const track = scene.tracks.find((k) => k.lane && k.lane.hi > k.lane.lo);
  if (track) reveal({ track, row: Math.min(track.lane.hi - 1, firstVisible(track.run, track.lane, view.t0 + track.run.zero)) });
}

function reveal(spot) {
  const { run, y, h } = spot.track;
  const [a, b] = [run.start[spot.row] - run.zero, run.end[spot.row] - run.zero];
  if (a < view.t0 || b > view.t1) pan((a + b) / 2 - (view.t0 + view.t1) / 2);
  const box = $("lanes");
  if (y < box.scrollTop) box.scrollTop = y;
  if (y + h > box.scrollTop + box.clientHeight) box.scrollTop = y + h - box.clientHeight;
  pick(spot);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const length = view.t1 - view.t0;
  const keys = {
    w: () => zoom(1 / 1.5), "+": () => zoom(1 / 1.5), "=": () => zoom(1 / 1.5),
    s: () => zoom(1.5), "-": () => zoom(1.5),
    a: () => pan(-length / 6), ArrowLeft: () => pan(-length / 6),
    d: () => pan(length / 6), ArrowRight: () => pan(length / 6),
    f: fit, 0: fit, Home: fit,
    n: () => step(1), p: () => step(-1), ArrowDown: () => lane(1), ArrowUp: () => lane(-1),
    "[": () => stretch(1 / 1.25), "]": () => stretch(1.25),
    Escape: () => { pick(null); showTip(null); },
  };
  const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (act) {
    event.preventDefault();
    act();
  }
}

function listenToLanes() {
  const lanes = $("lanes");
  let grip = null;
  lanes.addEventListener("keydown", onKey);
  lanes.addEventListener("scroll", redraw);
  lanes.addEventListener("pointerdown", (e) => {
    if (e.button === 0 && place(e).x <= widthCss()) grip = { x: e.clientX, y: e.clientY, top: lanes.scrollTop, t0: view.t0, far: false };
  });
  window.addEventListener("pointerup", (e) => {
    if (grip && !grip.far) pick(spotAt(e));
    grip = null;
  });
  window.addEventListener("pointercancel", () => (grip = null));
  lanes.addEventListener("pointerleave", () => {
    [view.hover, view.cursor] = [null, null];
    showTip(null);
    redraw();
  });
  window.addEventListener("pointermove", (e) => {
    if (!grip) return;
    grip.far ||= Math.hypot(e.clientX - grip.x, e.clientY - grip.y) > 4;
    if (!grip.far) return;
    pan(grip.t0 - ((e.clientX - grip.x) / widthCss()) * (view.t1 - view.t0) - view.t0);
    if (e.pointerType === "mouse") lanes.scrollTop = grip.top - (e.clientY - grip.y);
  });
  lanes.addEventListener("pointermove", (e) => {
    view.hover = grip && grip.far ? null : spotAt(e);
    const { x, t } = place(e);
    view.cursor = x >= 0 && x <= widthCss() ? t : null;
    showTip(view.hover, e.clientX, e.clientY);
    redraw();
  });
  lanes.addEventListener("dblclick", (e) => zoom(0.4, place(e).t));
  lanes.addEventListener("wheel", (e) => {
    const sideways = e.shiftKey ? e.deltaY || e.deltaX : Math.abs(e.deltaX) > Math.abs(e.deltaY) ? e.deltaX : 0;
    if (!(e.ctrlKey || e.metaKey || sideways)) return; // plain wheels scroll lanes and page
    e.preventDefault();
    if (sideways && !e.ctrlKey) pan((sideways / widthCss()) * (view.t1 - view.t0));
    else zoom(Math.exp(Math.max(-60, Math.min(60, e.deltaY)) * 0.008), place(e).t);
  }, { passive: false });
}

function listenToOverview() {
  const go = (e) => {
    const share = (e.clientX - $("overview").getBoundingClientRect().left - gutterCss()) / widthCss();
    pan(share * scene.length - (view.t0 + view.t1) / 2);
  };
  $("overview").addEventListener("pointerdown", (e) => {
    $("overview").setPointerCapture(e.pointerId);
    go(e);
  });
  $("overview").addEventListener("pointermove", (e) => e.buttons && go(e));
}

function save() {
  const run = view.runs[0];
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([traceText(run)], { type: "text/tab-separated-values" }));
  link.download = `${run.name.replace(/[^\w.-]+/g, "-")}.trace.tsv`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function listenToControls(runs) {
  const onCheck = (id, key) => {
    $(id).checked = wish[key];
    $(id).addEventListener("change", () => {
      wish[key] = $(id).checked;
      layout();
    });
  };
  for (const [id, key] of [["show-comm", "comm"], ["show-memory", "memory"], ["show-critical", "critical"], ["paired", "paired"]])
    onCheck(id, key);
  $("memory-label").hidden = !runs.some((r) => r.memory.size);
  $("critical-label").hidden = !runs.some((r) => r.critical);
  for (const [id, act] of [["zoom-in", () => zoom(1 / 1.5)], ["zoom-out", () => zoom(1.5)], ["fit", fit], ["save", save],
    ["taller", () => stretch(1.25)], ["shorter", () => stretch(1 / 1.25)]])
    $(id).addEventListener("click", act);
  $("choice").hidden = runs.length < 2;
  const choose = () => {
    const [a, b] = [$("run-a"), $("run-b")].map((s) => runs[s.value]);
    view.runs = b && b !== a ? [a, b] : [a];
    pick(null);
    layout();
    fit();
  };
  for (const id of ["run-a", "run-b"]) {
    if (id === "run-b") $(id).append(new Option("none", "none"));
    runs.forEach((r, i) => $(id).append(new Option(r.name, i)));
    $(id).addEventListener("change", choose);
  }
  $("run-a").value = 0;
  $("run-b").value = runs.length > 1 ? 1 : "none";
  choose();
}

async function main() {
  if (!data.runs.length) return;
  if (!window.DecompressionStream) throw new Error("this browser cannot unpack the timeline (it is from before 2023)");
  const runs = await Promise.all(data.runs.map(unpack));
  runs.forEach((r, i) => (r.index = i));
  colours = readColours(data.looks);
  view.runs = [runs[0]];
  $("timeline").hidden = false;
  listenToControls(runs);
  listenToLanes();
  listenToOverview();
  new ResizeObserver(layout).observe(document.querySelector(".frame"));
  window.addEventListener("resize", layout);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    colours = readColours(data.looks);
    redraw();
  });
  document.documentElement.dataset.ready = "yes";
}

main().catch((e) => {
  $("trouble").hidden = false;
  $("trouble").textContent = `The timeline could not be drawn: ${e.message}`;
});
