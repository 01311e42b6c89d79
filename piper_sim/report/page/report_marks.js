// What is drawn beside the ops: memory by kind, idle time by cause, the critical path, transfers.

const KINDS = { parameters: "#4c78a8", gradients: "#9d755d", optimizer: "#79706e", activations: "#59a14f", buffers: "#e6b422",
  workspace: "#e4605e" };
const CAUSES = { straggler: "#c62828", expert_skew: "#d84f9c", link: "#6d4fc4", host: "#5d4037", split: "#ef6c00", warmup: "#4fa3d1",
  drain: "#2f6f9f", dependency: "#8a8f98", memory: "#59a14f", collective: "#b59a00", compute: "#3d7fc4" };

// The sample of every pixel column: the highest of those in it, so no peak is lost; -1 before the first.
function memoryColumns(p, track, width) {
  const { run, samples } = track;
  const origin = p.t0 + run.zero;
  const found = new Int32Array(width).fill(-1);
  let i = Math.max(samples.lo, above(run.memory_time, samples.lo, samples.hi, origin) - 1);
  let held = -1;
  for (let x = 0; x < width && x / p.scale <= run.length - p.t0; x++) {
    let most = held;
    const until = origin + (x + 1) / p.scale;
    for (; i < samples.hi && run.memory_time[i] < until; i++) {
      if (most < 0 || run.memory_bytes[i] > run.memory_bytes[most]) most = i;
      held = i;
    }
    found[x] = most;
  }
  return found;
}

// Written pixel by pixel: paths of thousands of steps take a browser longer than this.
function paintMemory(p, track, y, h) {
  const { dpr, gutter } = p;
  const { run } = track;
  const width = p.W - gutter;
  const [canvas, context] = p.sheet;
  if (canvas.width !== width || canvas.height < h) [canvas.width, canvas.height, p.sheet.image] = [width, h, null];
  if (!p.sheet.image || p.sheet.image.height !== h) p.sheet.image = context.createImageData(width, h);
  const pixels = new Uint32Array(p.sheet.image.data.buffer);
  const shades = run.kinds.length ? run.kinds.map((kind) => p.colours.words[kind]) : [p.colours.words.memory];
  pixels.fill(p.colours.words.card);
  const scale = (h - 2 * dpr) / p.memoryTop;
  const columns = memoryColumns(p, track, width);
  const { levels } = run;
  const layers = shades.length;
  for (let x = 0; x < width; x++) {
    if (columns[x] < 0) continue;
    const at = columns[x] * layers;
    let row = h;
    for (let k = 0; k < layers; k++) {
      const top = h - Math.round(levels[at + k] * scale);
      while (row > top) pixels[--row * width + x] = shades[k];
    }
  }
  if (run.capacity && run.capacity <= p.memoryTop) {
    const row = Math.max(0, h - Math.round(run.capacity * scale)) * width;
    for (let x = 0; x < width; x++) if ((x / dpr) % 8 < 4) pixels[row + x] = p.colours.words.no;
  }
  context.putImageData(p.sheet.image, 0, 0);
  p.ctx.drawImage(canvas, 0, 0, width, h, gutter, y, width, h);
}

function paintGaps(p, track, y, h) {
  const { run, rank } = track;
  const [first, last] = run.gaps.get(rank) || [0, 0];
  const { ctx, gutter, dpr } = p;
  const strip = Math.max(2 * dpr, Math.round(h * 0.24));
  ctx.font = `${Math.min(10.5 * dpr, h * 0.5)}px ${SANS}`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  for (let i = above(run.gap_end, first, last, p.t0); i < last && run.gap_begin[i] < p.t1; i++) {
    const a = Math.max(gutter, gutter + (run.gap_begin[i] - p.t0) * p.scale);
    const b = Math.min(p.W, gutter + (run.gap_end[i] - p.t0) * p.scale);
    if (b - a < 0.7 * dpr) continue;
    const cause = run.causes[run.gap_cause[i]];
    ctx.fillStyle = CAUSES[cause] || p.colours.soft;
    ctx.fillRect(a, y + h - strip, b - a, strip);
    if (h > 14 * dpr && b - a > 8 * dpr * cause.length) {
      ctx.fillStyle = p.colours.soft;
      ctx.fillText(cause.replace("_", " "), (a + b) / 2, y + (h - strip) / 2 + dpr);
    }
  }
}

// Where a row's box stands: [left, right, top, height] in device pixels; null where its lane is not shown.
function boxOf(p, run, row) {
  const lane = laneOf(run, row);
  const track = p.trackOf.get(lane);
  if (!track) return null;
  const x = (t) => p.gutter + (t - run.zero - p.t0) * p.scale;
  return [x(run.start[row]), x(run.end[row]), (track.y - p.top) * p.dpr, track.h * p.dpr];
}

function paintPath(p, run) {
  const { ctx, dpr } = p;
  const n = (run.path_begin || []).length;
  if (!n) return;
  const from = Math.max(0, above(run.path_end, 0, n, p.t0) - 1);
  const to = Math.min(n, above(run.path_begin, from, n, p.t1) + 1);
  ctx.save();
  ctx.beginPath();
  ctx.rect(p.gutter, 0, p.W - p.gutter, p.H);
  ctx.clip();
  if ((p.W - p.gutter) / Math.max(1, to - from) < 4 * dpr) crowdedPath(p, run, from, to);
  else {
    const line = new Path2D();
    corners(p, run, from, to, (left, right, y, before) => {
      if (before !== null) line.lineTo(left, before);
      line.lineTo(left, y);
      line.lineTo(right, y);
    });
    for (const [colour, width] of [[p.colours.card, 4], [p.colours.path, 1.75]]) {
      [ctx.strokeStyle, ctx.lineWidth] = [colour, width * dpr];
      ctx.stroke(line);
    }
  }
  ctx.restore();
}

// Where the path stands, piece by piece: act(left, right, y, y of the piece before).
function corners(p, run, from, to, act) {
  const heights = new Map();
  for (const t of p.tracks)
    if (t.kind === "compute" && t.run === run) heights.set(t.rank, (t.y - p.top + t.h) * p.dpr - 2 * p.dpr);
  const zero = p.gutter - p.t0 * p.scale;
  let before = null;
  for (let i = from; i < to; i++) {
    const y = heights.get(run.path_rank[i]);
    if (y === undefined) continue;
    act(zero + run.path_begin[i] * p.scale, zero + run.path_end[i] * p.scale, y, before);
    before = y;
  }
}

// Thousands of corners: a line below each rank that the path is on, and a veil from rank to rank. A browser takes 140 ms
// to stroke 20,000 of them, and they would hide the ops.
function crowdedPath(p, run, from, to) {
  const { ctx, dpr } = p;
  const near = 3 * dpr;
  const lines = new Map(); // y -> [left, right] of what is not drawn yet
  const veil = [0, -Infinity, 0, 0]; // left, right, top, bottom
  const [bars, veils] = [[], []];
  corners(p, run, from, to, (left, right, y, before) => {
    const line = lines.get(y);
    if (line && left <= line[1] + near) line[1] = Math.max(line[1], right);
    else {
      if (line) bars.push([y, ...line]);
      lines.set(y, [left, Math.max(right, left + dpr)]);
    }
    if (before === null || before === y) return;
    const [top, bottom] = before < y ? [before, y] : [y, before];
    if (left <= veil[1] + near) {
      [veil[1], veil[2], veil[3]] = [Math.max(veil[1], left), Math.min(veil[2], top), Math.max(veil[3], bottom)];
      return;
    }
    veils.push([...veil]);
    [veil[0], veil[1], veil[2], veil[3]] = [left, left + dpr, top, bottom];
  });
  ctx.fillStyle = p.colours.path;
  ctx.globalAlpha = 0.16;
  for (const [left, right, top, bottom] of [...veils, veil]) ctx.fillRect(left, top, right - left, bottom - top);
  ctx.globalAlpha = 1;
  for (const [y, [left, right]] of lines) bars.push([y, left, right]);
  for (const [y, left, right] of bars) ctx.fillRect(left, y - dpr, right - left, 2 * dpr);
}

function arrow(p, from, to, colour) {
  const { ctx, dpr } = p;
  const [x0, y0, x1, y1] = [from[0], from[1], to[0], to[1]];
  const bend = Math.max(12 * dpr, Math.abs(x1 - x0) / 2);
  ctx.strokeStyle = ctx.fillStyle = colour;
  ctx.lineWidth = 1.5 * dpr;
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
  ctx.stroke();
  ctx.beginPath();
  ctx.moveTo(x1, y1);
  ctx.lineTo(x1 - 6 * dpr, y1 - 3.5 * dpr);
  ctx.lineTo(x1 - 6 * dpr, y1 + 3.5 * dpr);
  ctx.fill();
}

const MOST_FLOWS = 1500;

// Transfers from their sender to their receiver, where not too many are in sight.
function paintFlows(p, run) {
  if (!run.partner) return;
  const found = [];
  for (const track of p.tracks) {
    if (track.run !== run || !track.lane || !track.lane.stream.startsWith("send")) continue;
    const { lane } = track;
    const to = above(run.start, lane.lo, lane.hi, p.t1 + run.zero);
    for (let i = firstVisible(run, lane, p.t0 + run.zero); i < to && found.length <= MOST_FLOWS; i++) if (run.partner[i] >= 0) found.push(i);
  }
  if (found.length > MOST_FLOWS) return;
  for (const i of found) join(p, run, i, run.partner[i], p.colours.accent);
}

function join(p, run, from, to, colour) {
  const [a, b] = [boxOf(p, run, from), boxOf(p, run, to)];
  if (!a || !b) return;
  const sent = run.partner && run.partner[from] === to;
  arrow(p, [sent ? a[0] : a[1], a[2] + a[3] / 2], [sent ? b[1] : b[0], b[2] + b[3] / 2], colour);
}

// Of the op that is picked: what it waited for, back to the step's begin or so far; what it is one end of.
function paintReasons(p, { track, row }) {
  const { run } = track;
  if (run.partner && run.partner[row] >= 0) {
    const sends = laneOf(run, row).stream.startsWith("send");
    join(p, run, sends ? row : run.partner[row], sends ? run.partner[row] : row, p.colours.accent);
  }
  let at = row;
  for (let hops = 0; run.after && run.after[at] >= 0 && hops < 60; hops++) {
    join(p, run, run.after[at], at, p.colours.path);
    at = run.after[at];
  }
}

function paintSelection(p, box) {
  const { ctx, dpr } = p;
  const x = [box.t0, box.t1].map((t) => p.gutter + (t - p.t0) * p.scale);
  const y = [box.y0, box.y1].map((v) => (v - p.top) * dpr);
  ctx.globalAlpha = 0.14;
  ctx.fillStyle = p.colours.accent;
  ctx.fillRect(x[0], y[0], x[1] - x[0], y[1] - y[0]);
  ctx.globalAlpha = 1;
  ctx.strokeStyle = p.colours.accent;
  ctx.lineWidth = dpr;
  ctx.strokeRect(x[0], y[0], x[1] - x[0], y[1] - y[0]);
}
