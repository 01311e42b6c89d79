// What hand and keys do: pointer, wheel, two fingers, keyboard, controls.

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
    z: zoomToBox, b: () => setBoxing(!view.boxing), "/": () => $("find").focus(),
    Escape: () => { setBox(null); setBoxing(false); pick(null); showTip(null); },
  };
  const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (act) {
    event.preventDefault();
    act();
  }
}

function setBoxing(on) {
  view.boxing = on;
  $("box").setAttribute("aria-pressed", String(on));
}

function setBox(box) {
  view.box = box;
  showPanel(box);
  redraw();
}

// From where a drag began to where it is: seconds and lanes.
function boxTo(event) {
  const { start } = grip;
  const now = place(event);
  const t = [start.t, now.t].map((v) => Math.min(scene.length, Math.max(0, v))).sort((a, b) => a - b);
  const y = [start.y, now.y].sort((a, b) => a - b);
  return { t0: t[0], t1: t[1], y0: y[0], y1: y[1] };
}

let grip = null;
const fingers = new Map();

function pinch(event) {
  const before = [...fingers.values()];
  fingers.set(event.pointerId, event);
  const now = [...fingers.values()];
  const apart = (pair) => Math.max(20, Math.abs(pair[0].clientX - pair[1].clientX));
  const middle = { clientX: (now[0].clientX + now[1].clientX) / 2, clientY: now[0].clientY };
  zoom(apart(before) / apart(now), place(middle).t);
}

function dragTo(event) {
  grip.far ||= Math.hypot(event.clientX - grip.x, event.clientY - grip.y) > 4;
  if (!grip.far) return;
  if (grip.box) {
    view.box = boxTo(event);
    redraw();
    return;
  }
  pan(grip.t0 - ((event.clientX - grip.x) / widthCss()) * (view.t1 - view.t0) - view.t0);
  if (event.pointerType === "mouse") $("lanes").scrollTop = grip.top - (event.clientY - grip.y);
}

function listenToLanes() {
  const lanes = $("lanes");
  lanes.addEventListener("keydown", onKey);
  lanes.addEventListener("scroll", redraw);
  lanes.addEventListener("pointerdown", (e) => {
    fingers.set(e.pointerId, e);
    if (e.button !== 0 || place(e).x > widthCss() || fingers.size > 1) return;
    grip = { x: e.clientX, y: e.clientY, top: lanes.scrollTop, t0: view.t0, far: false, box: e.shiftKey || view.boxing, start: place(e) };
    if (grip.box) e.preventDefault(); // a shifted drag would select text
  });
  window.addEventListener("pointerup", (e) => {
    fingers.delete(e.pointerId);
    if (grip && grip.far && grip.box) setBox(boxTo(e));
    else if (grip && !grip.far) pick(spotAt(e));
    grip = null;
  });
  window.addEventListener("pointercancel", (e) => {
    fingers.delete(e.pointerId);
    grip = null;
  });
  lanes.addEventListener("pointerleave", () => {
    [view.hover, view.cursor] = [null, null];
    showTip(null);
    redraw();
  });
  window.addEventListener("pointermove", (e) => {
    if (fingers.size === 2 && fingers.has(e.pointerId)) pinch(e);
    else if (grip) dragTo(e);
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

// Runs are unpacked when they are first shown.
const loaded = new Map();
async function load(i) {
  if (!loaded.has(i)) loaded.set(i, await unpack(data.runs[i]));
  return loaded.get(i);
}

const CHECKS = [["show-comm", "comm"], ["show-inside", "inside"], ["show-memory", "memory"], ["show-path", "path"], ["show-gaps", "gaps"], ["show-flows", "flows"], ["paired", "paired"]];

async function choose() {
  const [a, b] = [$("run-a"), $("run-b")].map((s) => s.value);
  const wanted = b !== "none" && b !== a ? [a, b] : [a];
  view.runs = await Promise.all(wanted.map((i) => load(Number(i))));
  $("memory-label").hidden = !view.runs.some((r) => r.memory.size);
  $("inside-label").hidden = !view.runs.some((r) => r.parts.length);
  $("path-label").hidden = !view.runs.some((r) => r.path_begin && r.path_begin.length);
  $("gaps-label").hidden = !view.runs.some((r) => r.gaps.size);
  $("flows-label").hidden = !view.runs.some((r) => r.partner && r.partner.some((x) => x >= 0));
  setBox(null);
  search($("find").value);
  addLegend(view.runs);
  layout();
  fit();
  for (const run of view.runs) prepareCrowds(run, colours);
}

function listenToControls() {
  for (const [id, key] of CHECKS) {
    $(id).checked = wish[key];
    $(id).addEventListener("change", () => {
      wish[key] = $(id).checked;
      addLegend(view.runs);
      layout();
    });
  }
  for (const [id, act] of [["zoom-in", () => zoom(1 / 1.5)], ["zoom-out", () => zoom(1.5)], ["fit", fit], ["save", save],
    ["taller", () => stretch(1.25)], ["shorter", () => stretch(1 / 1.25)], ["box", () => setBoxing(!view.boxing)]])
    $(id).addEventListener("click", act);
  let soon = 0;
  $("find").addEventListener("input", () => {
    clearTimeout(soon);
    soon = setTimeout(() => search($("find").value), 120);
  });
  $("find").addEventListener("keydown", (e) => {
    if (e.key === "Enter") nextHit(e.shiftKey ? -1 : 1);
    if (e.key === "Escape") search(($("find").value = ""));
  });
  $("choice").hidden = data.runs.length < 2;
  for (const id of ["run-a", "run-b"]) {
    if (id === "run-b") $(id).append(new Option("none", "none"));
    data.runs.forEach((r, i) => $(id).append(new Option(r.name, i)));
    $(id).addEventListener("change", choose);
  }
  $("run-a").value = 0;
  $("run-b").value = "none";
}

async function main() {
  if (!data.runs.length) return;
  if (!window.DecompressionStream) throw new Error("this browser cannot unpack the timeline (it is from before 2023)");
  colours = readColours(data.looks);
  $("timeline").hidden = false;
  listenToControls();
  await choose();
  // What does not fit the first look is left to the second.
  if (window.innerWidth < 700 || scene.height > $("lanes").clientHeight + 4) $("show-comm").click();
  listenToLanes();
  listenToOverview();
  new ResizeObserver(layout).observe(document.querySelector(".frame"));
  window.addEventListener("resize", layout);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    colours = readColours(data.looks);
    for (const run of loaded.values()) for (const lane of run.lanes) lane.pictures = null;
    redraw();
  });
  document.documentElement.dataset.ready = "yes";
}

main().catch((e) => {
  $("trouble").hidden = false;
  $("trouble").textContent = `The timeline could not be drawn: ${e.message}`;
});
