// Crowded lanes: their colours averaged, once per view of them into pictures of several widths, which frames then scale.

const WIDTHS = [16384, 4096, 1024];

function averageLane(p, run, lane, from, to, y, h) {
  const { gutter } = p;
  const width = p.W - gutter;
  const texels = (scaleOf) => Math.ceil((scaleOf * (p.t1 - p.t0)) / run.length);
  // The narrowest picture that still has a texel per pixel; if none has, the rows themselves are few enough.
  const at = WIDTHS.findLastIndex((w) => texels(w) >= width);
  p.ctx.imageSmoothingEnabled = at >= 0;
  if (at >= 0) {
    const pictures = (lane.pictures ||= new Map());
    if (lane.followed !== p.followed) pictures.clear();
    lane.followed = p.followed;
    // A frame makes one, and more as it has time for; it shows others blurred, or not yet: the next one has them.
    const late = !pictures.has(at) && p.made && performance.now() > p.until;
    if (late) p.unfinished = true;
    else if (!pictures.has(at)) {
      pictures.set(at, picture(p, run, lane, WIDTHS[at]));
      p.made = true;
    }
    if (!pictures.size) return;
    const shown = late ? Math.min(...pictures.keys()) : at;
    const { canvas, halves } = pictures.get(shown);
    const k = WIDTHS[shown] / run.length;
    const [a, b] = [p.t0 * k, p.t1 * k];
    p.ctx.drawImage(canvas, a, 0, b - a, halves, gutter, y, width, h);
    return;
  }
  const halves = averageInto(p, run, from, to, { t0: p.t0, scale: p.scale, width }, p.strip, p.stripContext);
  p.ctx.drawImage(p.strip, 0, 0, width, halves, gutter, y, width, h);
}

// Pictures are made before anyone zooms, a lane at a time, so that no frame has to make them all.
function prepareCrowds(run, colours) {
  const lanes = run.lanes.filter((lane) => lane.hi - lane.lo > 200);
  const next = () => {
    const lane = lanes.shift();
    if (!lane || view.followed) return;
    lane.pictures ||= new Map();
    lane.followed ??= null;
    WIDTHS.forEach((width, at) => {
      if (!lane.pictures.has(at)) lane.pictures.set(at, picture({ colours, isFaint: null }, run, lane, width));
    });
    setTimeout(next);
  };
  setTimeout(next, 50);
}

function picture(p, run, lane, width) {
  const canvas = document.createElement("canvas");
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const view = { t0: 0, scale: width / run.length, width };
  return { canvas, halves: averageInto(p, run, lane.lo, lane.hi, view, canvas, context) };
}

// A fused pair shows its forward above, its backward below: then two rows of pixels, else one.
function averageInto(p, run, from, to, view, canvas, context) {
  const halves = run.look.subarray(from, to).includes(p.colours.fused) ? 2 : 1;
  if (canvas.width !== view.width || canvas.height < halves) [canvas.width, canvas.height] = [view.width, halves];
  for (let half = 0; half < halves; half++) {
    const image = context.createImageData(view.width, 1);
    averageRow(p, run, from, to, p.colours.halves[half], view, image.data);
    context.putImageData(image, 0, half);
  }
  return halves;
}

function averageRow(p, run, from, to, palette, { t0, scale, width }, pixels) {
  const { colours, isFaint } = p;
  const { start, end, look } = run;
  const sums = new Float32Array(pixels.length); // red, green, blue, covered share
  const origin = t0 + run.zero;
  for (let i = from; i < to; i++) {
    const a = Math.max(0, (start[i] - origin) * scale);
    const b = Math.min(width, (end[i] - origin) * scale);
    const c = palette[look[i] + (isFaint && isFaint(run, i) ? colours.looks : 0)];
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
