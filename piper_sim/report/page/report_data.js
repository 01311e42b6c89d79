// From base64 to typed arrays; columns.py is the other half.

const TYPES = { f8: [Float64Array, 8], i4: [Int32Array, 4], f4: [Float32Array, 4], u1: [Uint8Array, 1] };

async function gunzip(text) {
  const raw = atob(text);
  const packed = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) packed[i] = raw.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function readColumns(specs, bytes) {
  const columns = {};
  let at = 0;
  for (const [name, type, n] of specs) {
    if (type === "json") {
      columns[name] = JSON.parse(new TextDecoder().decode(bytes.subarray(at, at + n)));
      at += n;
    } else {
      const [Type, width] = TYPES[type];
      columns[name] = new Type(bytes.buffer, at, n);
      at += n * width;
    }
  }
  return columns;
}

function addUp(codes) {
  for (let i = 1; i < codes.length; i++) codes[i] += codes[i - 1];
}

// A run as the page uses it: rows lane by lane, in time; times in seconds as in the trace.
async function unpack(meta) {
  const c = readColumns(meta.columns, await gunzip(meta.blob));
  if (meta.timing === "gaps") {
    let t = 0;
    for (let i = 0; i < c.start.length; i++) {
      t += c.start[i];
      c.start[i] = t;
      t += c.end[i];
      c.end[i] = t;
    }
  }
  for (const name of ["op", "mb", "mb2", "cost", "inside", "step"]) if (c[name]) addUp(c[name]);
  for (const name of ["partner", "after"]) if (c[name]) rowsAgain(c[name]);
  let at = 0;
  const lanes = meta.lanes.map(([rank, stream, n]) => {
    const lane = { rank, stream: meta.streams[stream], lo: at, hi: at + n };
    at += n;
    lane.ordered = true;
    for (let i = lane.lo + 1; i < lane.hi && lane.ordered; i++) lane.ordered = c.end[i] >= c.end[i - 1];
    return lane;
  });
  const memory = new Map();
  at = 0;
  for (const [rank, n] of meta.memory_lanes) {
    let peak = 0;
    for (let i = at; i < at + n; i++) peak = Math.max(peak, c.memory_bytes[i]);
    memory.set(rank, { lo: at, hi: at + n, peak });
    at += n;
  }
  const ranks = [...new Set([...lanes.map((l) => l.rank), ...memory.keys()])].sort((a, b) => a - b);
  const critical = new Uint8Array(c.op.length);
  for (const i of c.path_row || []) if (i >= 0) critical[i] = 1;
  const parts = (c.inside_texts || []).map((text) => (text ? JSON.parse(text) : []));
  return { ...meta, ...c, lanes, memory, ranks, critical, parts, levels: stacked(c, meta.kinds.length), gaps: gapsByRank(c), steps: stepStarts(c) };
}

// Rows that others name: told by how far off they are; far below zero where there is none (-1) or it is the host (-2).
function rowsAgain(codes) {
  for (let i = 0; i < codes.length; i++) codes[i] += codes[i] < -(2 ** 29) ? 2 ** 30 : i;
}

// Kinds of memory on top of each other: [sample][kind] bytes of it and of all below it.
function stacked(c, kinds) {
  if (!kinds) return c.memory_bytes;
  const n = c.memory_bytes.length;
  const out = new Float32Array(n * kinds);
  for (let k = 0; k < kinds; k++) {
    const values = c[`kind${k}`];
    for (let i = 0; i < n; i++) out[i * kinds + k] = values[i] + (k ? out[i * kinds + k - 1] : 0);
  }
  return out;
}

// The text of a row: its pattern, with its microbatches put in.
function textOf(run, i) {
  const text = run.op_texts[run.op[i]];
  if (run.mb[i] < 0) return text;
  const once = text.replace("*", run.mb[i]);
  return run.mb2[i] < 0 ? once : once.replace("*", run.mb2[i]);
}

// Gaps stand rank by rank, in time: rank -> [first, behind the last].
function gapsByRank(c) {
  const found = new Map();
  for (let i = 0; i < (c.gap_rank || []).length; i++) {
    const mine = found.get(c.gap_rank[i]);
    if (mine) mine[1] = i + 1;
    else found.set(c.gap_rank[i], [i, i + 1]);
  }
  return found;
}

function laneOf(run, row) {
  let [lo, hi] = [0, run.lanes.length - 1];
  while (lo < hi) {
    const mid = (lo + hi + 1) >> 1;
    if (run.lanes[mid].lo <= row) lo = mid;
    else hi = mid - 1;
  }
  return run.lanes[lo];
}

function stepStarts(c) {
  const first = new Map();
  for (let i = 0; i < c.step.length; i++) {
    const t = first.get(c.step[i]);
    if (t === undefined || c.start[i] < t) first.set(c.step[i], c.start[i]);
  }
  return [...first].sort((a, b) => a[0] - b[0]);
}

// First index in [lo, hi) whose value exceeds t.
function above(values, lo, hi, t) {
  while (lo < hi) {
    const mid = (lo + hi) >> 1;
    if (values[mid] > t) hi = mid;
    else lo = mid + 1;
  }
  return lo;
}

function firstVisible(run, lane, t) {
  return lane.ordered ? above(run.end, lane.lo, lane.hi, t) : lane.lo;
}

// The trace in piper-sim's own file format (ir/trace_text.py).
function traceText(run) {
  const rows = [];
  for (const lane of run.lanes) for (let i = lane.lo; i < lane.hi; i++) rows.push([lane, i]);
  const byText = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  rows.sort(
    ([a, i], [b, j]) => a.rank - b.rank || run.start[i] - run.start[j] || byText(a.stream, b.stream) || i - j,
  );
  const samples = [...run.memory].sort((a, b) => a[0] - b[0]);
  const counted = run.memory_time ? run.memory_time.length : null;
  const head = { piper_trace: 1, rows: rows.length, memory_samples: counted, header: run.header };
  const lines = [JSON.stringify(head), "step\trank\tstream\top\tpost_s\tstart_s\tend_s"];
  for (const [lane, i] of rows) {
    const times = [run.start[i] - run.wait[i], run.start[i], run.end[i]];
    lines.push([run.step[i], lane.rank, lane.stream, textOf(run, i), ...times].join("\t"));
  }
  if (counted !== null) {
    lines.push("rank\ttime_s\tbytes");
    for (const [rank, { lo, hi }] of samples)
      for (let i = lo; i < hi; i++) lines.push([rank, run.memory_time[i], run.memory_bytes[i]].join("\t"));
  }
  return lines.join("\n") + "\n";
}
