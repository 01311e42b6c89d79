// What stands where: tracks from top to bottom, in CSS pixels; and words for numbers.

const HEAD = 28;
const GAP = 0.3;
const HEIGHTS = { compute: 1, comm: 0.34, inside: 0.4, memory: 0.95 };

function rankTracks(run, tag, rank, wish) {
  const tracks = run.lanes
    .filter((lane) => lane.rank === rank && (wish.comm || lane.stream === wish.compute))
    .map((lane) => ({ kind: lane.stream === wish.compute ? "compute" : "comm", run, tag, rank, lane }));
  const at = wish.inside && run.parts.length ? tracks.findIndex((k) => k.kind === "compute") : -1;
  if (at >= 0) tracks.splice(at + 1, 0, { kind: "inside", run, tag, rank, of: tracks[at] });
  if (wish.memory && run.memory.has(rank)) tracks.push({ kind: "memory", run, tag, rank, samples: run.memory.get(rank) });
  return tracks;
}

// Runs below each other, or rank by rank: rank 0 of all runs, rank 1 of all runs …
function blocks(runs, wish) {
  const tags = runs.length > 1 ? ["A", "B"] : [""];
  if (!wish.paired || runs.length < 2)
    return runs.flatMap((run, k) => [
      ...(runs.length > 1 ? [[{ kind: "head", run, tag: tags[k] }]] : []),
      ...run.ranks.map((rank) => rankTracks(run, "", rank, wish)),
    ]);
  const ranks = [...new Set(runs.flatMap((r) => r.ranks))].sort((a, b) => a - b);
  return ranks.map((rank) => runs.flatMap((run, k) => rankTracks(run, tags[k], rank, wish)));
}

function buildScene(runs, wish, room) {
  const all = blocks(runs, wish).filter((b) => b.length);
  const flat = all.flat();
  const heads = flat.filter((t) => t.kind === "head").length;
  const units = flat.reduce((sum, t) => sum + (HEIGHTS[t.kind] || 0), 0) + GAP * (all.length - heads);
  const unit = Math.max(10, Math.min(30, (room - heads * HEAD - 8) / Math.max(1, units))) * wish.stretch;
  // Whole pixels per kind, so that all ranks look alike.
  const height = (kind) => (kind === "head" ? HEAD : Math.max(3, Math.round(unit * HEIGHTS[kind])));
  let y = 4;
  for (const block of all) {
    for (const [i, track] of block.entries()) {
      if (i && track.run !== block[i - 1].run) y += Math.round((unit * GAP) / 2);
      track.y = y;
      track.h = height(track.kind) - (track.kind === "head" ? 0 : 1);
      y += height(track.kind);
    }
    if (block[0].kind !== "head") y += Math.round(unit * GAP);
  }
  const memoryMost = Math.max(1, ...runs.flatMap((r) => [...r.memory.values()].map((m) => m.peak)));
  const capacity = Math.max(0, ...runs.map((r) => r.capacity || 0));
  return {
    runs,
    tracks: flat,
    height: Math.ceil(y + 4),
    length: Math.max(...runs.map((r) => r.length)) || 1,
    // A capacity far above all curves would only flatten them.
    memoryTop: capacity && capacity < 2 * memoryMost ? Math.max(capacity, memoryMost) : memoryMost,
  };
}

function unitOf(t) {
  const a = Math.abs(t);
  if (a >= 1 || a === 0) return [1, "s"];
  if (a >= 1e-3) return [1e-3, "ms"];
  return a >= 1e-6 ? [1e-6, "µs"] : [1e-9, "ns"];
}

function seconds(t, digits = 6) {
  const [scale, unit] = unitOf(t);
  return `${Number((t / scale).toPrecision(digits))} ${unit}`;
}

function bytesText(n) {
  for (const [scale, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (n >= scale) return `${(n / scale).toFixed(1)} ${unit}`;
  return `${n} B`;
}

// What a group's ranks do together at a time, in a compute op: the op's spot, and which of its parts.
function insideAt(track, at) {
  const { run, lane } = track;
  const row = firstVisible(run, lane, at);
  if (row >= lane.hi || run.start[row] > at) return null;
  const share = (at - run.start[row]) / (run.end[row] - run.start[row]);
  const part = run.parts[run.inside[row]].find(([a, b]) => a <= share && share < b);
  return part ? { track, row, part, inside: true } : null;
}

// Round times in [t0, t1], and how to write them.
function ticks(t0, t1, most) {
  const raw = (t1 - t0) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999999);
  const [scale, unit] = unitOf(Math.max(Math.abs(t0), Math.abs(t1)));
  const places = Math.max(0, Math.min(15, Math.ceil(-Math.log10(step / scale) - 1e-9)));
  const found = [];
  for (let i = Math.ceil(t0 / step - 1e-9); i * step <= t1; i++)
    found.push([i * step, `${((i * step) / scale).toFixed(places)} ${unit}`]);
  return found;
}

// What a pointer at (seconds, y) stands on: a track, and its op if there is one (within `near` seconds).
function whatIsAt(scene, t, y, near) {
  const track = scene.tracks.find((k) => y >= k.y && y < k.y + k.h + 1);
  if (!track || track.kind === "head") return null;
  const { run } = track;
  const at = t + run.zero;
  if (track.kind === "inside") return insideAt(track.of, at);
  if (track.kind === "memory") {
    const i = above(run.memory_time, track.samples.lo, track.samples.hi, at) - 1;
    return { track, row: -1, bytes: i < track.samples.lo ? null : run.memory_bytes[i], sample: i, time: t, inside: true };
  }
  let best = -1;
  let distance = near;
  for (let i = Math.max(track.lane.lo, firstVisible(run, track.lane, at) - 2); i < track.lane.hi; i++) {
    if (run.start[i] > at + near) break;
    const d = Math.max(run.start[i] - at, at - run.end[i], 0);
    if (d < distance || (d === 0 && distance === 0)) [best, distance] = [i, d];
  }
  return best < 0 ? null : { track, row: best, inside: distance === 0 };
}
