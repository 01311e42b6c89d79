// Words: about the op under the pointer, about what a box holds, about what is searched for.

function facts(spot) {
  const { track, row, bytes, time, sample } = spot;
  const { run } = track;
  const where = `${track.rank}${view.runs.length > 1 ? ` of ${run.name}` : ""}`;
  if (row < 0) {
    const kinds = bytes === null ? [] : run.kinds.map((kind, k) => [kind, bytesText(run[`kind${k}`][sample])]);
    return [["rank", where], ["time", seconds(time + run.zero)], ["allocated", bytes === null ? "–" : bytesText(bytes)], ...kinds];
  }
  const found = [
    ["class", data.looks[run.look[row]].word],
    ["rank", where],
    ["stream", track.lane.stream],
    ["start", seconds(run.start[row], 9)],
    ["end", seconds(run.end[row], 9)],
    ["duration", seconds(run.end[row] - run.start[row])],
  ];
  if (spot.part) {
    const [a, b, words] = spot.part;
    found.unshift(["inside", words], ["exposed", seconds((b - a) * (run.end[row] - run.start[row]))], ["ranks", run.met[track.rank]]);
  }
  if (run.bytes && run.bytes[row]) found.push(["bytes", bytesText(run.bytes[row])]);
  if (run.wait[row] > 0) found.push(["posted", `${seconds(run.wait[row])} before`]);
  if (run.steps.length > 1) found.push(["step", String(run.step[row])]);
  if (run.after) found.push(...reason(run, row));
  if (run.cost && run.cost_texts[run.cost[row]]) found.push(["cost", run.cost_texts[run.cost[row]]]);
  if (run.critical[row]) found.push(["critical", "on the critical path"]);
  return found;
}

function reason(run, row) {
  const at = run.after[row];
  if (at === -1) return [];
  return [["waited for", at === -2 ? "its launch by the host" : `${textOf(run, at)} on rank ${laneOf(run, at).rank}`]];
}

function gapFacts({ track, gap }) {
  const { run } = track;
  const took = run.gap_end[gap] - run.gap_begin[gap];
  const found = [["rank", String(track.rank)], ["idle for", seconds(took)], ["mainly", run.causes[run.gap_cause[gap]].replace("_", " ")]];
  const row = run.gap_row[gap];
  if (row >= 0) found.push(["behind it", `${textOf(run, row)} on rank ${laneOf(run, row).rank}`]);
  return found;
}

const said = (spot) => (spot.gap >= 0 ? gapFacts(spot) : facts(spot));
const nameOf = (spot) => (spot.gap >= 0 ? "idle" : spot.row < 0 ? "memory" : textOf(spot.track.run, spot.row));

function listOf(rows) {
  const list = document.createElement("dl");
  for (const [key, value] of rows) {
    const [dt, dd] = [document.createElement("dt"), document.createElement("dd")];
    dt.textContent = key;
    dd.textContent = value;
    list.append(dt, dd);
  }
  return list;
}

function showTip(spot, x, y) {
  const tip = $("tip");
  tip.hidden = !spot;
  if (!spot) return;
  const name = document.createElement("b");
  const shade = spot.gap >= 0 ? CAUSES[spot.track.run.causes[spot.track.run.gap_cause[spot.gap]]] : spot.row >= 0 ? colours.css[spot.track.run.look[spot.row]] : null;
  if (shade) name.append(chip(shade));
  name.append(nameOf(spot)); // append(text) makes a text node: an op's name is never markup
  tip.replaceChildren(name, listOf(said(spot)));
  tip.style.left = tip.style.top = "0"; // at an edge it would be measured squeezed
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, x + 16 + box.width > window.innerWidth ? x - box.width - 16 : x + 16)}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 16, window.innerHeight - box.height - 8))}px`;
}

function chip(colour, thin = false) {
  const found = document.createElement("i");
  found.style.background = colour;
  if (thin) found.className = "thin";
  return found;
}

// The legend of what scripts draw; that of the ops is in the page already.
function addLegend(runs) {
  const used = new Set(runs.flatMap((r) => Array.from(r.gap_cause || [], (c) => r.causes[c])));
  const kinds = [...new Set(runs.flatMap((r) => r.kinds))];
  const legend = document.querySelector(".legend");
  for (const old of legend.querySelectorAll(".drawn")) old.remove();
  const add = (text, colour, thin) => {
    const item = document.createElement("li");
    item.className = "drawn";
    item.append(chip(colour, thin), text);
    legend.append(item);
  };
  if (wish.path && runs.some((r) => r.path_begin && r.path_begin.length)) add("critical path", colours.path, true);
  if (wish.inside && runs.some((r) => r.parts.length)) add("inside ops: exposed collectives of a group", colours.inside);
  if (wish.gaps) for (const cause of used) add(`idle: ${cause.replace("_", " ")}`, CAUSES[cause], true);
  if (wish.memory) for (const kind of kinds) add(kind, KINDS[kind]);
}

function pick(spot) {
  view.picked = spot;
  $("said").textContent = spot ? [nameOf(spot), ...said(spot).map(([k, v]) => `${k} ${v}`)].join(" · ") : "";
  follow();
}

// --- what is followed: a microbatch, or what was searched for; all other rows lose their colour ---

function follow() {
  const { picked, query } = view;
  let faint = null;
  if (picked && picked.row >= 0) {
    const { run } = picked.track;
    const wanted = [run.mb[picked.row], run.mb2[picked.row]].filter((m) => m >= 0);
    const step = run.step[picked.row];
    faint = (r, i) =>
      wanted.length ? !((wanted.includes(r.mb[i]) || (r.mb2[i] >= 0 && wanted.includes(r.mb2[i]))) && r.step[i] === step) : r !== run || i !== picked.row;
  } else if (query) faint = (r, i) => !r.hits || !r.hits[i];
  view.faint = faint;
  view.followed = faint ? {} : null; // a new one each time: pictures of crowded lanes are made again
  redraw();
}

function search(text) {
  const wanted = text.trim().toLowerCase();
  view.query = wanted;
  view.hit = -1;
  let found = 0;
  for (const run of view.runs) {
    run.hits = wanted ? new Uint8Array(run.op.length) : null;
    const names = run.op_texts.map((t) => t.toLowerCase());
    for (let i = 0; wanted && i < run.op.length; i++) {
      const name = names[run.op[i]];
      if (run.mb[i] < 0 ? name.includes(wanted) : textOf(run, i).toLowerCase().includes(wanted)) found += run.hits[i] = 1;
    }
  }
  $("found").textContent = wanted ? `${found} found` : "";
  pick(null);
}

// The next row that was found, in the order of the first run's lanes.
function nextHit(by) {
  const [run] = view.runs;
  if (!run.hits) return;
  const n = run.hits.length;
  for (let k = 1, i = view.hit; k <= n; k++) {
    i = (i + by + n) % n;
    if (!run.hits[i]) continue;
    const lane = laneOf(run, i);
    const track = scene.tracks.find((t) => t.lane === lane);
    if (!track) continue;
    view.hit = i;
    const wide = Math.max((run.end[i] - run.start[i]) * 30, scene.length * 1e-6);
    if (wide < view.t1 - view.t0) zoom(wide / (view.t1 - view.t0), (run.start[i] + run.end[i]) / 2 - run.zero);
    reveal({ track, row: i });
    return;
  }
}

// --- what a box holds ---

function statistics(box) {
  const classes = new Map();
  const idle = new Map();
  let [lanes, carried] = [0, 0];
  for (const track of scene.tracks) {
    if (!track.lane || track.y + track.h < box.y0 || track.y > box.y1) continue;
    const { run, lane } = track;
    const [t0, t1] = [box.t0 + run.zero, box.t1 + run.zero];
    lanes++;
    for (let i = firstVisible(run, lane, t0); i < lane.hi && run.start[i] < t1; i++) {
      const took = Math.min(run.end[i], t1) - Math.max(run.start[i], t0);
      if (took < 0) continue;
      const mine = classes.get(run.look[i]) || { n: 0, sum: 0, most: 0 };
      mine.n++;
      mine.sum += took;
      mine.most = Math.max(mine.most, run.end[i] - run.start[i]);
      classes.set(run.look[i], mine);
      if (run.bytes && run.partner[i] < i) carried += run.bytes[i];
    }
    if (track.kind !== "compute") continue;
    const [first, last] = run.gaps.get(track.rank) || [0, 0];
    for (let i = above(run.gap_end, first, last, t0); i < last && run.gap_begin[i] < t1; i++) {
      const cause = run.causes[run.gap_cause[i]];
      idle.set(cause, (idle.get(cause) || 0) + Math.min(run.gap_end[i], t1) - Math.max(run.gap_begin[i], t0));
    }
  }
  return { classes, idle, lanes, carried };
}

function showPanel(box) {
  const panel = $("panel");
  panel.hidden = !box;
  if (!box) return;
  const { classes, idle, lanes, carried } = statistics(box);
  const heading = document.createElement("h3");
  heading.textContent = `${seconds(box.t1 - box.t0)} of ${lanes} lanes${carried ? `, ${bytesText(carried)} on the wire` : ""}`;
  const table = document.createElement("table");
  const line = (cells, colour) => {
    const row = table.insertRow();
    for (const [i, text] of cells.entries()) {
      const cell = row.insertCell();
      if (i) cell.className = "number";
      else if (colour) cell.append(chip(colour));
      cell.append(text);
    }
  };
  line(["", "ops", "seconds", "mean", "longest"]);
  for (const [look, { n, sum, most }] of [...classes].sort((a, b) => b[1].sum - a[1].sum))
    line([data.looks[look].word, String(n), seconds(sum, 4), seconds(sum / n, 4), seconds(most, 4)], colours.css[look]);
  for (const [cause, sum] of [...idle].sort((a, b) => b[1] - a[1])) line([`idle: ${cause.replace("_", " ")}`, "", seconds(sum, 4), "", ""], CAUSES[cause]);
  const button = document.createElement("button");
  button.textContent = "zoom here";
  button.addEventListener("click", zoomToBox);
  panel.replaceChildren(heading, button, table);
}

function zoomToBox() {
  if (!view.box) return;
  [view.t0, view.t1] = [view.box.t0, view.box.t1];
  clampView();
  redraw();
}
