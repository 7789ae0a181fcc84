// When everything runs: a row for each device and link, its critical path and why it is idle.

const { bars, transfers, critical, idle, tracks } = data.timeline;
const STEP = data.timeline.step_ns;
const GUTTER = 150;
const AXIS = 26;
const DEVICE_ROW = 34;
const LINK_ROW = 20;
const MOST_TRACKS = 24;
const IDLE_STROKES = ["dots", "cross", "diagonal", null]; // by reason

const barsOf = Array.from({ length: N }, () => []);
bars.op.forEach((op, bar) => barsOf[op].push(bar));
const isCritical = new Uint8Array(bars.op.length);
const isCriticalTransfer = new Uint8Array(transfers.bar.length);
const deviceOfBar = (bar) => ops.device[bars.op[bar]];
const barName = (bar) => ops.id[bars.op[bar]] + (data.micro_batches > 1 ? ` [micro-batch ${bars.batch[bar]}]` : "");

function markCritical() {
  const sent = new Map();
  transfers.bar.forEach((bar, k) => sent.set(`${bar},${transfers.to[k]},${transfers.end_ns[k]}`, k));
  critical.kind.forEach((kind, at) => {
    if (critical.kinds[kind] === "compute") isCritical[critical.bar[at]] = 1;
    if (critical.kinds[kind] === "transfer") isCriticalTransfer[sent.get(`${critical.bar[at]},${critical.to[at]},${critical.end_ns[at]}`)] = 1;
  });
}

const gantt = { rows: [], begin: 0, end: STEP, chosen: null, view: null, told: null, more: 0 };

function makeRows() {
  const rows = data.devices.map((device, d) => ({ title: device.name, device: d, height: DEVICE_ROW, items: [] }));
  bars.op.forEach((op, bar) => rows[ops.device[op]].items.push({ kind: "op", at: bar, begin: bars.start_ns[bar], end: bars.end_ns[bar] }));
  idle.device.forEach((d, k) => rows[d].items.push({ kind: "idle", at: k, begin: idle.start_ns[k], end: idle.end_ns[k] }));
  const busy = (track) => track.transfers.reduce((sum, k) => sum + transfers.end_ns[k] - transfers.start_ns[k], 0);
  const busiest = [...tracks].sort((a, b) => busy(b) - busy(a)).slice(0, MOST_TRACKS);
  gantt.more = tracks.length - busiest.length;
  for (const track of tracks.filter((one) => busiest.includes(one))) {
    rows.push({ title: track.title, short: ends(track), height: LINK_ROW, items: track.transfers.map((k) => ({ kind: "transfer", at: k, begin: transfers.start_ns[k], end: transfers.end_ns[k] })) });
  }
  let top = AXIS;
  for (const row of rows) {
    row.items = row.items.filter((item) => item.end > item.begin).sort((a, b) => a.begin - b.begin);
    row.top = top;
    top += row.height + (row.device == null ? 4 : 8);
  }
  gantt.rows = rows;
  return top + 6;
}

// A link by the numbers of its devices, where their names are too long.
function ends(track) {
  const [from, to] = [transfers.from, transfers.to].map((side) => [...new Set(track.transfers.map((k) => side[k]))].sort((a, b) => a - b).join(", "));
  return `device ${from} → ${to}`;
}

function ganttSection() {
  markCritical();
  const height = makeRows();
  const host = el("div", { class: "canvas" });
  gantt.told = el("div", { class: "told", "aria-live": "polite" });
  const tools = el("div", { class: "tools" }, ganttLegend(), el("span", { class: "space" }), button("−", () => zoomGantt(1 / 1.5), "zoom out"), button("+", () => zoomGantt(1.5), "zoom in"), button("Fit", fitGantt));
  section(
    "when",
    "When",
    el("p", {}, `The simulated step takes ${nanoseconds(STEP)}${data.micro_batches > 1 ? ` for ${data.micro_batches} micro-batches` : ""}. ${idleSentence()}`),
    tools,
    host,
    gantt.told,
    el("p", { class: "hint" }, "Drag to move, click for details. With the chart in focus: left and right arrows go from bar to bar, up and down from row to row, + and − or the wheel zoom, 0 fits.", gantt.more ? ` The ${MOST_TRACKS} busiest of ${tracks.length} links are drawn.` : ""),
    el("h3", {}, "Where the time of every device goes"),
    table(idleColumns(), data.devices.map((_, d) => d)),
    criticalSummary(),
    numbers(`The critical path, ${plural(critical.bar.length, "part")}`, criticalColumns(), () => [...critical.bar.keys()]),
    numbers(`All ${plural(transfers.bar.length, "transfer")}`, transferColumns(), () => [...transfers.bar.keys()]),
  );
  gantt.view = surface(host, height, "timeline of devices and links; arrow keys go from bar to bar", drawGantt);
  gantt.view.canvas.addEventListener("keydown", ganttKey);
  listenToGantt(gantt.view.canvas);
  tellChosen();
}

function ganttLegend() {
  const mark = el("span", { class: "key critical", "aria-hidden": "true" });
  const reasons = { producer: "waits for an op elsewhere", "link busy": "waits for a link", transfer: "waits for a transfer" };
  const found = Object.entries(reasons).map(([why, told]) => el("span", { class: "device" }, el("span", { class: `key ${IDLE_STROKES[idle.whys.indexOf(why)]}`, "aria-hidden": "true" }), told));
  return legend(el("span", { class: "device" }, mark, "on the critical path"), ...found, el("span", { class: "device" }, el("span", { class: "key", "aria-hidden": "true" }), "nothing left to do"));
}

// ---- numbers ----

const idleOf = (device, why) => idle.device.reduce((sum, d, k) => (d === device && idle.whys[idle.why[k]] === why ? sum + idle.end_ns[k] - idle.start_ns[k] : sum), 0);
const busyOf = (device) => bars.op.reduce((sum, op, bar) => (ops.device[op] === device ? sum + bars.end_ns[bar] - bars.start_ns[bar] : sum), 0);
const withShare = (ns) => (ns ? `${nanoseconds(ns)} (${share(ns, STEP)})` : "–");

function idleColumns() {
  return [
    ["device", (d) => deviceLabel(d)],
    ["ops", (d) => count(ops.device.filter((of) => of === d).length), true],
    ["busy", (d) => withShare(busyOf(d)), true],
    ["waits for an op elsewhere", (d) => withShare(idleOf(d, "producer")), true],
    ["waits for a link", (d) => withShare(idleOf(d, "link busy")), true],
    ["waits for a transfer", (d) => withShare(idleOf(d, "transfer")), true],
    ["nothing left", (d) => withShare(idleOf(d, "nothing left")), true],
  ];
}

function idleSentence() {
  const busy = data.devices.map((_, d) => busyOf(d));
  const used = busy.filter((ns) => ns > 0);
  if (used.length === 1) return `Only ${deviceName(busy.findIndex((ns) => ns > 0))} is used, it is busy ${share(used[0], STEP)} of the time.`;
  const least = busy.indexOf(Math.min(...used));
  if (busy[least] > 0.97 * STEP) return `Every device in use is busy for at least ${share(busy[least], STEP)} of it.`;
  const reasons = idle.whys.map((why) => [why, idleOf(least, why)]).sort((a, b) => b[1] - a[1]);
  const [why, ns] = reasons[0];
  const told = { producer: "waits for ops on other devices", "link busy": "waits until links are free", transfer: "waits for transfers", "nothing left": "has nothing left to do" }[why];
  return `${deviceName(least)} is the least busy of those in use, ${share(busy[least], STEP)} of the time; for most of the rest, ${withShare(ns)}, it ${told}.`;
}

function criticalSummary() {
  const lasts = (kind) => critical.kind.reduce((sum, k, at) => (critical.kinds[k] === kind ? sum + critical.end_ns[at] - critical.start_ns[at] : sum), 0);
  const number = critical.kind.filter((k) => critical.kinds[k] === "compute").length;
  const parts = [`${plural(number, "op")} ${number === 1 ? "takes" : "take"} ${withShare(lasts("compute"))}`];
  if (lasts("transfer")) parts.push(`transfers ${withShare(lasts("transfer"))}`);
  if (lasts("link busy")) parts.push(`waiting for links ${withShare(lasts("link busy"))}`);
  return el("p", { class: "after" }, `The critical path decides how long the step is: ${parts.join(", ")}.`);
}

const between = (from, to) => (from === to ? deviceName(from) : `${deviceName(from)} → ${deviceName(to)}`);

function criticalColumns() {
  return [
    ["from", (at) => nanoseconds(critical.start_ns[at]), true],
    ["lasts", (at) => nanoseconds(critical.end_ns[at] - critical.start_ns[at]), true],
    ["what", (at) => critical.kinds[critical.kind[at]]],
    ["where", (at) => between(critical.from[at], critical.to[at])],
    ["op", (at) => breakable(barName(critical.bar[at]))],
  ];
}

function transferColumns() {
  return [
    ["from", (k) => nanoseconds(transfers.start_ns[k]), true],
    ["lasts", (k) => nanoseconds(transfers.end_ns[k] - transfers.start_ns[k]), true],
    ["waited", (k) => nanoseconds(transfers.start_ns[k] - transfers.request_ns[k]), true],
    ["size", (k) => bytes(transfers.bytes[k]), true],
    ["where", (k) => between(transfers.from[k], transfers.to[k])],
    ["output of", (k) => breakable(barName(transfers.bar[k]))],
  ];
}

// ---- drawing ----

const timeToX = (ns) => GUTTER + ((ns - gantt.begin) / (gantt.end - gantt.begin)) * (gantt.view.width - GUTTER - 12);
const xToTime = (x) => gantt.begin + ((x - GUTTER) / (gantt.view.width - GUTTER - 12)) * (gantt.end - gantt.begin);

function drawGantt(view, colours) {
  const { context, width, height } = view;
  context.fillStyle = colours.surface;
  context.fillRect(0, 0, width, height);
  context.save();
  context.beginPath();
  context.rect(GUTTER, 0, width - GUTTER, height);
  context.clip();
  drawTimeAxis(context, colours, height);
  for (const row of gantt.rows) for (const item of row.items) drawItem(context, row, item, colours, width);
  if (gantt.chosen) frameChosen(context, colours);
  context.restore();
  context.textBaseline = "middle";
  for (const row of gantt.rows) nameRow(context, row, colours);
}

function drawTimeAxis(context, colours, height) {
  const { unit, tell } = inUnit(gantt.end / 1e9, TIMES);
  context.font = `12px ${FONT}`;
  context.textBaseline = "alphabetic";
  for (const at of ticks(gantt.begin / 1e9, gantt.end / 1e9, 8)) {
    const x = timeToX(at * 1e9);
    context.fillStyle = colours.line;
    context.fillRect(x, AXIS - 6, 1, height - AXIS + 6);
    context.fillStyle = colours.soft;
    const last = x > gantt.view.width - 60;
    context.textAlign = last ? "right" : "left";
    context.fillText(`${tell(at)} ${unit}`, x + (last ? -3 : 3), 15);
  }
}

function drawItem(context, row, item, colours, width) {
  const left = Math.max(timeToX(item.begin), GUTTER - 4);
  const right = Math.min(timeToX(item.end), width + 4);
  if (right <= GUTTER || left >= width) return;
  const wide = Math.max(right - left - (right - left > 3 ? 1 : 0), 0.7);
  if (item.kind === "idle") {
    const strokes = IDLE_STROKES[idle.why[item.at]];
    if (!strokes || wide < 1) return;
    context.globalAlpha = 0.6;
    context.fillStyle = pattern(context, strokes, colours.soft);
    context.fillRect(left, row.top + 2, wide, row.height - 4);
    context.globalAlpha = 1;
    return;
  }
  const isOp = item.kind === "op";
  const device = isOp ? row.device : transfers.from[item.at];
  fillDevice(context, device, left, row.top, wide, row.height);
  if (isOp ? isCritical[item.at] : isCriticalTransfer[item.at]) {
    context.fillStyle = colours.ink;
    context.fillRect(left, row.top + row.height, Math.max(wide, 1), 4);
  }
  if (isOp && wide > 34) {
    context.font = `11.5px ${FONT}`;
    context.textAlign = "left";
    context.textBaseline = "middle";
    labelDevice(context, device, fitted(context, opLabel(bars.op[item.at]), wide - 8), left + 4, row.top + row.height / 2 + 0.5);
  }
}

function frameChosen(context, colours) {
  const { row, item } = gantt.chosen;
  const left = timeToX(item.begin);
  context.strokeStyle = colours.accent;
  context.lineWidth = 3;
  context.strokeRect(left - 1, row.top - 1, Math.max(timeToX(item.end) - left, 2) + 2, row.height + 2);
}

function nameRow(context, row, colours) {
  const middle = row.top + row.height / 2;
  let left = 10;
  context.textAlign = "center";
  if (row.device != null) {
    fillDevice(context, row.device, left, middle - 9, 22, 18);
    context.font = `600 11px ${FONT}`;
    labelDevice(context, row.device, String(row.device), left + 11, middle + 0.5);
    left += 30;
  }
  context.textAlign = "left";
  context.font = `${row.device == null ? "11.5" : "600 13"}px ${FONT}`;
  context.fillStyle = row.device == null ? colours.soft : colours.ink;
  const fits = row.device != null || context.measureText(row.title).width <= GUTTER - left - 8;
  context.fillText(fitted(context, fits ? row.title : row.short, GUTTER - left - 8), left, middle + 0.5);
}

// ---- input ----

function fitGantt() {
  [gantt.begin, gantt.end] = [0, STEP];
  gantt.view.redraw();
}

function moveGantt(begin, length) {
  const span = Math.min(Math.max(length, 50), STEP);
  gantt.begin = Math.min(Math.max(begin, 0), STEP - span);
  gantt.end = gantt.begin + span;
  gantt.view.redraw();
}

function zoomGantt(factor, around = (gantt.begin + gantt.end) / 2) {
  const length = (gantt.end - gantt.begin) / factor;
  moveGantt(around - (around - gantt.begin) / factor, length);
}

function itemAt(x, y) {
  const row = gantt.rows.find((one) => y >= one.top - 2 && y <= one.top + one.height + 4);
  if (!row || x < GUTTER) return null;
  const [at, near] = [xToTime(x), (3 * (gantt.end - gantt.begin)) / gantt.view.width];
  const away = (item) => Math.max(item.begin - at, at - item.end, 0);
  const item = row.items.filter((one) => away(one) <= near).sort((a, b) => away(a) - away(b) || a.end - a.begin - (b.end - b.begin))[0];
  return item ? { row, item } : null;
}

function choose(chosen) {
  gantt.chosen = chosen;
  if (chosen) {
    const { begin, end } = chosen.item;
    const length = gantt.end - gantt.begin;
    if (begin < gantt.begin || end > gantt.end) moveGantt((begin + end) / 2 - length / 2, length);
  }
  gantt.view.redraw();
  tellChosen();
}

function ganttKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key in ARROWS) stepGantt(...ARROWS[event.key]);
  else if (event.key === "+" || event.key === "=") zoomGantt(1.5, middleOfChosen());
  else if (event.key === "-") zoomGantt(1 / 1.5, middleOfChosen());
  else if (event.key === "0") fitGantt();
  else if (event.key === "Escape") choose(null);
  else return;
  event.preventDefault();
}

const middleOfChosen = () => (gantt.chosen ? (gantt.chosen.item.begin + gantt.chosen.item.end) / 2 : undefined);

function stepGantt(dx, dy) {
  const rows = gantt.rows.filter((row) => row.items.length);
  if (!gantt.chosen) {
    choose({ row: rows[0], item: rows[0].items[0] });
    return;
  }
  const { row, item } = gantt.chosen;
  if (dx) {
    const next = row.items[row.items.indexOf(item) + dx];
    if (next) choose({ row, item: next });
    return;
  }
  const other = rows[rows.indexOf(row) + dy];
  const away = (one) => Math.max(one.begin - item.begin, item.begin - one.end, 0);
  if (other) choose({ row: other, item: other.items.reduce((best, one) => (away(one) < away(best) ? one : best)) });
}

function listenToGantt(canvas) {
  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.offsetX, begin: gantt.begin, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held || (!held.moved && Math.abs(event.offsetX - held.x) < 4)) return;
    held.moved = true;
    const length = gantt.end - gantt.begin;
    moveGantt(held.begin - ((event.offsetX - held.x) / (gantt.view.width - GUTTER)) * length, length);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (held && !held.moved) choose(itemAt(event.offsetX, event.offsetY));
    held = null;
  });
  canvas.addEventListener("pointercancel", () => (held = null));
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (document.activeElement !== canvas && !event.ctrlKey) return; // the page scrolls
      event.preventDefault();
      zoomGantt(Math.exp(-event.deltaY / 400), xToTime(event.offsetX));
    },
    { passive: false },
  );
}

// ---- what is chosen, in words ----

function tellChosen() {
  const chosen = gantt.chosen;
  if (!chosen) {
    gantt.told.replaceChildren(el("p", { class: "hint" }, "Nothing is selected."));
    return;
  }
  const { item } = chosen;
  const span = `${nanoseconds(item.begin)} to ${nanoseconds(item.end)}, ${nanoseconds(item.end - item.begin)}`;
  const told = { op: tellOp, idle: tellIdle, transfer: tellTransfer }[item.kind](item, chosen.row);
  gantt.told.replaceChildren(el("p", {}, ...told, el("span", { class: "soft" }, ` (${span})`)));
}

const barButton = (bar) => button(breakable(barName(bar)), () => reveal(bars.op[bar]), `show ${barName(bar)} in the graph`);
const tellOp = (item, row) => [deviceLabel(row.device), " runs ", barButton(item.at), isCritical[item.at] ? ", on the critical path" : ""];

function tellTransfer({ at: k }) {
  const waited = transfers.start_ns[k] - transfers.request_ns[k];
  return [
    "The output of ",
    barButton(transfers.bar[k]),
    ` goes ${between(transfers.from[k], transfers.to[k])}: ${bytes(transfers.bytes[k])}`,
    waited ? `, after it waited ${nanoseconds(waited)} for the link` : "",
    isCriticalTransfer[k] ? ", on the critical path" : "",
  ];
}

function tellIdle({ at: k }, row) {
  const who = deviceLabel(row.device);
  const [producer, holder] = [idle.producer[k], idle.holder[k]];
  if (producer < 0) return [who, " is idle: it has nothing left to do"];
  const from = deviceName(deviceOfBar(producer));
  const next = [", which ", barButton(idle.reader[k]), " reads"];
  switch (idle.whys[idle.why[k]]) {
    case "producer":
      return [who, ` is idle: it waits until ${from} has made `, barButton(producer), ...next];
    case "link busy":
      return [who, ` is idle: it waits for `, barButton(producer), ` of ${from}`, ...next, ", behind the transfer of ", barButton(holder)];
    default:
      return [who, ` is idle: it waits while `, barButton(producer), ` comes from ${from}`, ...next];
  }
}
