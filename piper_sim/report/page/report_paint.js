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
  const names = ["card", "ink", "soft", "line", "ground", "memory", "accent"];
  return {
    ...Object.fromEntries(names.map((n) => [n, of(n)])),
    groundRgb: ground,
    css: all.map(css),
    halves, // the palette of the upper and of the lower half of a lane
    text: all.map((c, i) => (i >= looks.length ? null : dark(c) ? "#fff" : "#14202e")),
    looks: looks.length,
    fused,
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
  if (to - from > (W - gutter) / 5) averageLane(p, run, from, to, y, h);
  else boxLane(p, track, from, to, y, h);
}

function averageLane(p, run, from, to, y, h) {
  const { colours, gutter } = p;
  const width = p.W - gutter;
  // A fused pair shows its forward above, its backward below: then two rows of pixels, else one.
  const halves = run.look.subarray(from, to).includes(colours.fused) ? 2 : 1;
  if (p.strip.width !== width) [p.strip.width, p.strip.height] = [width, 2];
  for (let half = 0; half < halves; half++) {
    const image = p.stripContext.createImageData(width, 1);
    averageRow(p, run, from, to, colours.halves[half], image.data);
    p.stripContext.putImageData(image, 0, half);
  }
  p.ctx.imageSmoothingEnabled = false;
  p.ctx.drawImage(p.strip, 0, 0, width, halves, gutter, y, width, h);
}

function averageRow(p, run, from, to, palette, pixels) {
  const { colours, scale, isFaint } = p;
  const { start, end, look } = run;
  const width = pixels.length / 4;
  const sums = new Float32Array(pixels.length); // red, green, blue, covered share
  const origin = p.t0 + run.zero;
  for (let i = from; i < to; i++) {
    const a = Math.max(0, (start[i] - origin) * scale);
    const b = Math.min(width, (end[i] - origin) * scale);
    const c = palette[look[i] + (isFaint(run, i) ? colours.looks : 0)];
    for (let x = a | 0; x < b; x++) {
      const share = Math.min(b, x + 1) - Math.max(a, x);
      sums[4 * x] += share * c[0];
      sums[4 * x + 1] += share * c[1];
      sums[4 * x + 2] += share * c[2];
      sums[4 * x + 3] += share;
    }
  }
  const [r, g, b] = colours.groundRgb;
  for (let at = 0; at < pixels.length; at += 4) {
    const cover = sums[at + 3];
    const over = cover > 1 ? 1 / cover : 1; // rows of one lane do not overlap, but a foreign file's may
    const free = cover < 1 ? 1 - cover : 0;
    pixels[at] = sums[at] * over + r * free;
    pixels[at + 1] = sums[at + 1] * over + g * free;
    pixels[at + 2] = sums[at + 2] * over + b * free;
    pixels[at + 3] = 255;
  }
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

function box(p, run, i, x, y, w, h, letters) {
  const { ctx, colours } = p;
  const look = run.look[i];
  const shade = look + (p.isFaint(run, i) ? colours.looks : 0);
  const halves = look === colours.fused ? 2 : 1;
  for (let half = 0; half < halves; half++) {
    ctx.fillStyle = css(colours.halves[half][shade]);
    ctx.fillRect(x, y + (half * h) / halves, w, h / halves);
  }
  if (letters < 1 || !colours.text[shade]) return;
  ctx.fillStyle = colours.text[shade];
  const members = run.op_texts[run.op[i]].replace(/^\((.*)\)OVERLAP_F_B$/, "$1").split(";");
  const split = members.length === 2 && h >= 24 * p.dpr; // room for a line in either half
  for (const [half, member] of split ? members.entries() : [[0, members.join(";")]]) {
    const text = fitting(member, letters);
    if (text) ctx.fillText(text, x + w / 2, y + (split ? (half + 0.5) / 2 : 0.5) * h + p.dpr * 0.5);
  }
}

// The most of an op's text that fits so many letters.
function fitting(op, letters) {
  const pass = op.split("/")[0];
  const numbers = [...pass.matchAll(/[A-Z](\d+)/g)].map((m) => m[1]).join(";");
  return [op, pass, numbers].find((t) => t.length && t.length <= letters) || null;
}

function paintMemory(p, track, y, h) {
  const { ctx, gutter, scale, dpr } = p;
  const { run, samples } = track;
  const origin = p.t0 + run.zero;
  const bottom = y + h;
  const height = (bytes) => (bytes / p.memoryTop) * (h - dpr);
  const from = Math.max(samples.lo, above(run.memory_time, samples.lo, samples.hi, origin) - 1);
  const path = new Path2D();
  const before = from < samples.hi && run.memory_time[from] <= origin;
  let last = before ? run.memory_bytes[from] : 0;
  let column = -1;
  let high = 0;
  path.moveTo(gutter, bottom - height(last));
  // Samples that share a pixel leave their highest, so no peak is lost.
  const put = (x, v) => {
    path.lineTo(x, bottom - height(last));
    path.lineTo(x, bottom - height(v));
    last = v;
  };
  for (let i = from; i < samples.hi; i++) {
    const x = Math.max(gutter, gutter + (run.memory_time[i] - origin) * scale);
    if (x > p.W) break;
    const v = run.memory_bytes[i];
    if ((x | 0) === column && v <= high) {
      last = v;
      continue;
    }
    [column, high] = [x | 0, v];
    put(x, v);
  }
  const stop = Math.min(p.W, gutter + Math.max(0, (run.length - p.t0) * scale));
  path.lineTo(stop, bottom - height(last));
  ctx.strokeStyle = p.colours.memory;
  ctx.lineWidth = dpr;
  ctx.globalAlpha = 0.9;
  ctx.stroke(path);
  path.lineTo(stop, bottom);
  path.lineTo(gutter, bottom);
  ctx.globalAlpha = 0.2;
  ctx.fillStyle = p.colours.memory;
  ctx.fill(path);
  ctx.globalAlpha = 1;
  if (run.capacity && run.capacity <= p.memoryTop) {
    ctx.setLineDash([4 * dpr, 4 * dpr]);
    ctx.beginPath();
    ctx.moveTo(gutter, bottom - height(run.capacity));
    ctx.lineTo(p.W, bottom - height(run.capacity));
    ctx.stroke();
    ctx.setLineDash([]);
  }
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
    ctx.fillText(`${track.tag ? track.tag + "  " : ""}rank ${track.rank}`, x, y + h / 2);
  } else if (small >= 8 * dpr) {
    ctx.fillStyle = colours.soft;
    ctx.font = `${small}px ${SANS}`;
    ctx.fillText(track.kind === "memory" ? `peak ${bytesText(track.samples.peak)}` : track.lane.stream, x, y + h / 2);
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
