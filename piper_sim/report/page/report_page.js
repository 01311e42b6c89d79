// The page: what is shown, and what hand and keys do to it.

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const wish = { comm: true, memory: true, inside: false, paired: false, path: true, gaps: true, flows: false, stretch: 1, compute: data.compute };
const view = { t0: 0, t1: 1, hover: null, picked: null, cursor: null, box: null, boxing: false, query: "", faint: null, followed: null };
const strip = document.createElement("canvas");
const stripContext = strip.getContext("2d", { willReadFrequently: true }); // written by the processor: keep it there
const sheet = ((canvas) => [canvas, canvas.getContext("2d", { willReadFrequently: true })])(document.createElement("canvas"));
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

const gutterCss = () => (window.innerWidth < 700 ? 64 : 108);
const widthCss = () => Math.max(50, $("lanes").clientWidth - gutterCss());

function layout() {
  const room = Math.max(300, Math.min(window.innerHeight * 0.72, window.innerHeight - 300));
  scene = buildScene(view.runs, wish, room);
  scene.trackOf = new Map(scene.tracks.filter((k) => k.lane).map((k) => [k.lane, k]));
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

const FRAME_MS = 16;

function redraw() {
  if (drawn) return;
  drawn = true;
  requestAnimationFrame(() => {
    drawn = false;
    paint();
  });
}

function paint() {
  const ctx = contexts.canvas;
  const dpr = window.devicePixelRatio || 1;
  const [W, H] = [ctx.canvas.width, ctx.canvas.height];
  const gutter = Math.round(gutterCss() * dpr);
  const scale = (W - gutter) / (view.t1 - view.t0);
  const until = performance.now() + FRAME_MS / 4;
  const p = { ctx, W, H, dpr, gutter, scale, t0: view.t0, t1: view.t1, colours, strip, stripContext, sheet, until };
  const top = $("lanes").scrollTop;
  Object.assign(p, { isFaint: view.faint, followed: view.followed, memoryTop: scene.memoryTop, top, tracks: scene.tracks });
  p.trackOf = scene.trackOf;
  ctx.fillStyle = colours.card;
  ctx.fillRect(0, 0, W, H);
  const marks = ticks(view.t0, view.t1, widthCss() / 110);
  ctx.fillStyle = colours.line;
  for (const [t] of marks) ctx.fillRect(Math.round(gutter + (t - view.t0) * scale), 0, 1, H);
  for (const track of scene.tracks) {
    const [y, h] = [Math.round((track.y - top) * dpr), Math.round(track.h * dpr)];
    if (y > H || y + h < 0) continue;
    if (track.kind === "memory") paintMemory(p, track, y, h);
    else if (track.kind === "inside") paintInside(p, track.of, y, h);
    else if (track.kind !== "head") paintLane(p, track, y, h);
    if (track.kind === "compute" && wish.gaps) paintGaps(p, track, y, h);
    for (const spot of [view.hover, view.picked])
      if (spot && spot.track.lane === track.lane && spot.track.run === track.run && spot.row >= 0) outline(p, spot, y, h);
  }
  for (const run of view.runs) {
    if (wish.flows) paintFlows(p, run);
    if (wish.path && !view.followed) paintPath(p, run);
  }
  if (view.picked && view.picked.row >= 0) paintReasons(p, view.picked);
  if (view.box) paintSelection(p, view.box);
  ctx.fillStyle = colours.card;
  for (const track of scene.tracks) {
    const [y, h] = [Math.round((track.y - top) * dpr), Math.round(track.h * dpr)];
    if (y <= H && y + h >= 0) paintGutter(p, track, y, h);
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
  if (p.unfinished) redraw();
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
  if (x < 0) return null;
  const spot = whatIsAt(scene, t, y, (3 * (view.t1 - view.t0)) / widthCss());
  if (spot && spot.inside) return spot;
  return (wish.gaps && gapAt(t, y)) || spot;
}

function gapAt(t, y) {
  const track = scene.tracks.find((k) => y >= k.y && y < k.y + k.h + 1);
  if (!track || track.kind !== "compute" || !track.run.gaps.size) return null;
  const [first, last] = track.run.gaps.get(track.rank) || [0, 0];
  const gap = above(track.run.gap_end, first, last, t);
  return gap < last && track.run.gap_begin[gap] <= t ? { track, row: -1, gap } : null;
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

