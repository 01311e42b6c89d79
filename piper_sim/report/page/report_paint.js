// Drawing, in device pixels. A crowded lane is averaged pixel by pixel, so its cost is bounded by rows, not by boxes.

const MONO = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
const SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif";

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const css = ([r, g, b]) => `rgb(${r | 0},${g | 0},${b | 0})`;
const mix = (a, b, share) => a.map((x, i) => x * (1 - share) + b[i] * share);

function readColours(looks) {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue("--" + name).trim();
  const ground = rgb(of("ground"));
  const full = looks.map((l) => rgb(l.colour));
  // Rows that are not followed lose most of their colour, and with it their text.
  const faint = full.map((c) => mix(c, ground, 0.78));
  const all = [...full, ...faint];
  const place = (key) => looks.findIndex((l) => l.key === key);
  const fused = place("FB");
  const halves = ["F", "B"].map((key) => all.map((c, i) => (i % looks.length === fused ? all[i - fused + place(key)] : c)));
  const dark = (c) => 0.299 * c[0] + 0.587 * c[1] + 0.114 * c[2] < 150;
  const names = ["card", "ink", "soft", "line", "ground", "memory", "accent", "path", "no"];
  const word = (hex) => new Uint32Array(new Uint8Array([...rgb(hex), 255]).buffer)[0]; // a pixel, in this machine's order
  const plain = { memory: of("memory"), card: of("card"), no: of("no"), ...KINDS };
  return {
    words: Object.fromEntries(Object.entries(plain).map(([k, hex]) => [k, word(hex)])),
    ...Object.fromEntries(names.map((n) => [n, of(n)])),
    groundRgb: ground,
    css: all.map(css),
    cssHalves: halves.map((half) => half.map(css)),
    halves, // the palette of the upper and of the lower half of a lane
    text: all.map((c, i) => (i >= looks.length ? null : dark(c) ? "#fff" : "#14202e")),
    looks: looks.length,
    fused,
    inside: looks[place("tp")].colour,
  };
}

// p: { ctx, W, H, dpr, gutter, scale (pixels per second), t0, t1, colours, isFaint(run, row) }
function paintLane(p, track, y, h) {
  const { run, lane } = track;
  const { ctx, gutter, W } = p;
  ctx.fillStyle = p.colours.ground;
  ctx.fillRect(gutter, y, W - gutter, h);
  const from = firstVisible(run, lane, p.t0 + run.zero);
  const to = above(run.start, from, lane.hi, p.t1 + run.zero);
  if (to - from > (W - gutter) / 5) averageLane(p, run, lane, from, to, y, h);
  else boxLane(p, track, from, to, y, h);
}

function boxLane(p, track, from, to, y, h) {
  const { ctx, gutter, scale, dpr } = p;
  const { run } = track;
  const origin = p.t0 + run.zero;
  ctx.save();
  ctx.beginPath();
  ctx.rect(gutter, y, p.W - gutter, h);
  ctx.clip();
  ctx.font = `${Math.min(12 * dpr, h * 0.62)}px ${MONO}`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  const letter = h >= 11 * dpr ? ctx.measureText("0").width : Infinity;
  for (let i = from; i < to; i++) {
    const a = Math.max(gutter - 2, gutter + (run.start[i] - origin) * scale);
    const b = Math.min(p.W + 2, gutter + (run.end[i] - origin) * scale);
    // A hairline between neighbours, once they are wide enough to lose it.
    const w = Math.max(dpr * 0.75, b - a - (b - a > 5 * dpr ? dpr : 0));
    box(p, run, i, a, y, w, h, (w - 6 * dpr) / letter);
  }
  ctx.restore();
}

// What a group's ranks do together inside a lane's ops; where an op is too narrow for that, how much of it.
function paintInside(p, { run, lane }, y, h) {
  const { ctx, gutter, W, dpr } = p;
  const origin = p.t0 + run.zero;
  const sums = new Float64Array(W - gutter + 1);
  ctx.fillStyle = p.colours.ground;
  ctx.fillRect(gutter, y, W - gutter, h);
  ctx.fillStyle = p.colours.inside;
  for (let i = firstVisible(run, lane, origin); i < lane.hi && run.start[i] < p.t1 + run.zero; i++) {
    const parts = run.parts[run.inside[i]];
    const from = (run.start[i] - origin) * p.scale;
    const wide = (run.end[i] - run.start[i]) * p.scale;
    if (wide > 2 * dpr * parts.length) {
      for (const [a, b] of parts) {
        const left = Math.max(0, from + a * wide);
        if (from + b * wide > left) ctx.fillRect(gutter + left, y, Math.max(dpr / 2, from + b * wide - left), h);
      }
    } else {
      const share = (parts.share ??= parts.reduce((sum, [a, b]) => sum + b - a, 0));
      const [a, b] = [Math.max(0, from), Math.min(sums.length, from + wide)];
      for (let x = a | 0; x < b; x++) sums[x] += share * (Math.min(b, x + 1) - Math.max(a, x));
    }
  }
  for (let x = 0; x < sums.length; x++) if (sums[x]) ctx.fillRect(gutter + x, y + h * (1 - Math.min(1, sums[x])), 1, h * Math.min(1, sums[x]));
}

function box(p, run, i, x, y, w, h, letters) {
  const { ctx, colours } = p;
  const look = run.look[i];
  const shade = look + (p.isFaint && p.isFaint(run, i) ? colours.looks : 0);
  const halves = look === colours.fused ? 2 : 1;
  for (let half = 0; half < halves; half++) {
    ctx.fillStyle = colours.cssHalves[half][shade];
    ctx.fillRect(x, y + (half * h) / halves, w, h / halves);
  }
  if (letters < 1 || !colours.text[shade]) return;
  ctx.fillStyle = colours.text[shade];
  const split = h >= 24 * p.dpr; // room for a line in either half
  const lines = linesOf(run, i, split);
  for (let k = 0; k < lines.length; k++) {
    const text = lines[k].find((t) => t.length && t.length <= letters);
    if (text) ctx.fillText(text, x + w / 2, y + ((k + 0.5) / lines.length) * h + p.dpr * 0.5);
  }
}

// Of each line of a box, its texts, longest first. Kept: they are the same in every frame.
function linesOf(run, i, split) {
  const kept = (split ? (run.split_lines ||= new Map()) : (run.whole_lines ||= new Map()));
  if (!kept.has(i)) {
    const members = shortText(run, i).split(";");
    kept.set(i, (split && members.length === 2 ? members : [members.join(";")]).map(spellings));
  }
  return kept.get(i);
}

const shortText = (run, i) => textOf(run, i).replace(/^\((.*)\)OVERLAP_F_B$/, "$1");

// An op's text, its pass, its numbers alone.
function spellings(op) {
  const pass = op.split("/")[0];
  return [op, pass, [...pass.matchAll(/[A-Z](\d+)/g)].map((m) => m[1]).join(";")];
}

function paintGutter(p, track, y, h) {
  const { ctx, gutter, dpr, colours } = p;
  const x = gutter - 8 * dpr;
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  if (track.kind === "head") {
    ctx.textAlign = "left";
    ctx.fillStyle = colours.ink;
    ctx.font = `600 ${13 * dpr}px ${SANS}`;
    ctx.fillText(`${track.tag}  ${track.run.name}  ·  ${seconds(track.run.length)}`, 10 * dpr, y + h / 2 + 2 * dpr);
    return;
  }
  const small = Math.min(10.5 * dpr, h * 1.05);
  if (track.kind === "compute") {
    ctx.fillStyle = colours.ink;
    ctx.font = `600 ${Math.max(8.5 * dpr, Math.min(12.5 * dpr, h * 0.8))}px ${SANS}`;
    const speed = track.run.slow[track.rank];
    if (speed) ctx.fillStyle = colours.no;
    const name = `${track.tag ? track.tag + "  " : ""}rank ${track.rank}`;
    ctx.fillText(speed ? `▼ ${name}${gutter < 90 * dpr ? "" : ` ×${speed}`}` : name, x, y + h / 2);
  } else if (small >= 8 * dpr) {
    ctx.fillStyle = colours.soft;
    ctx.font = `${small}px ${SANS}`;
    const name = { memory: () => bytesText(track.samples.peak), inside: () => track.run.met[track.rank] }[track.kind];
    ctx.fillText(name ? name() : track.lane.stream, x, y + h / 2);
  }
}

function paintAxis(ctx, p, marks, cursor) {
  const { W, dpr, gutter, scale, colours } = p;
  const H = ctx.canvas.height;
  ctx.fillStyle = colours.card;
  ctx.fillRect(0, 0, W, H);
  ctx.font = `${11 * dpr}px ${SANS}`;
  ctx.textBaseline = "middle";
  ctx.textAlign = "left";
  for (const [t, text] of marks) {
    const x = gutter + (t - p.t0) * scale;
    ctx.fillStyle = colours.line;
    ctx.fillRect(x, H - 8 * dpr, dpr, 8 * dpr);
    ctx.fillStyle = colours.soft;
    if (x + ctx.measureText(text).width < W) ctx.fillText(text, x + 4 * dpr, H / 2);
  }
  if (cursor !== null) {
    const text = seconds(cursor);
    const x = gutter + (cursor - p.t0) * scale;
    const w = ctx.measureText(text).width + 10 * dpr;
    const left = Math.min(x, W - w);
    ctx.fillStyle = colours.ink;
    ctx.fillRect(left, 2 * dpr, w, H - 4 * dpr);
    ctx.fillStyle = colours.card;
    ctx.fillText(text, left + 5 * dpr, H / 2);
  }
}

// How many of a run's ranks compute, slice by slice of the whole time.
function utilisation(run, length, columns, compute) {
  const busy = new Float64Array(columns);
  const lanes = run.lanes.filter((l) => l.stream === compute);
  const scale = columns / length;
  for (const lane of lanes)
    for (let i = lane.lo; i < lane.hi; i++) {
      const a = (run.start[i] - run.zero) * scale;
      const b = Math.min(columns, (run.end[i] - run.zero) * scale);
      for (let x = a | 0; x < b; x++) busy[x] += Math.min(b, x + 1) - Math.max(a, x);
    }
  return busy.map((v) => Math.min(1, v / Math.max(1, lanes.length)));
}

function paintOverview(ctx, p, curves, length) {
  const { W, dpr, gutter, colours } = p;
  const H = ctx.canvas.height;
  ctx.fillStyle = colours.card;
  ctx.fillRect(0, 0, W, H);
  ctx.font = `${10.5 * dpr}px ${SANS}`;
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  ctx.fillStyle = colours.soft;
  ctx.fillText(gutter < 100 * dpr ? "computing" : "ranks computing", gutter - 8 * dpr, H / 2);
  curves.forEach((curve, k) => {
    const path = new Path2D();
    path.moveTo(gutter, H);
    curve.forEach((v, x) => path.lineTo(gutter + x * dpr, H - v * (H - 4 * dpr)));
    path.lineTo(gutter + curve.length * dpr, H);
    ctx.fillStyle = ctx.strokeStyle = k ? colours.accent : colours.memory;
    ctx.globalAlpha = k ? 0.9 : 0.35;
    ctx.lineWidth = dpr;
    if (k) ctx.stroke(path);
    else ctx.fill(path);
  });
  const scale = (W - gutter) / length;
  const [a, b] = [gutter + p.t0 * scale, gutter + p.t1 * scale];
  ctx.globalAlpha = 0.72;
  ctx.fillStyle = colours.ground;
  ctx.fillRect(gutter, 0, a - gutter, H);
  ctx.fillRect(b, 0, W - b, H);
  ctx.globalAlpha = 1;
  ctx.fillStyle = colours.accent;
  if (p.t0 > 0 || p.t1 < length) {
    ctx.fillRect(a - dpr, 0, 2 * dpr, H);
    ctx.fillRect(b - dpr, 0, 2 * dpr, H);
  }
}
