// The timeline: a row for each device and link, critical path and reasons for idle times.

const { bars, transfers, critical, idle, tracks } = data.timeline;
const STEP = data.timeline.step_ns;
// Width of the row names.
const gutter = () => Math.min(150, 0.3 * gantt.view.width);
const AXIS = 26;
const DEVICE_ROW = 34;
const LINK_ROW = 20;
const MOST_TRACKS = 24;
const IDLE_STROKES = ["dots", "cross", "diagonal", null, "dots"]; // by reason

const barsOf = Array.from({ length: N }, () => []);
bars.op.forEach((op, bar) => barsOf[op].push(bar));
const isCritical = new Uint8Array(bars.op.length);
const isCriticalTransfer = new Uint8Array(transfers.bar.length);
const deviceOfBar = (bar) => ops.device[bars.op[bar]];
const barName = (bar) =>
  ops.id[bars.op[bar]] + (data.micro_batches > 1 ? ` [micro-batch ${bars.batch[bar]}]` : "");

function markCritical() {
  const sent = new Map();
  transfers.bar.forEach((bar, k) =>
    sent.set(`${bar},${transfers.to[k]},${transfers.end_ns[k]}`, k),
  );
  critical.kind.forEach((kind, at) => {
    if (critical.kinds[kind] === "compute") isCritical[critical.bar[at]] = 1;
    if (critical.kinds[kind] === "transfer")
      isCriticalTransfer[
        sent.get(`${critical.bar[at]},${critical.to[at]},${critical.end_ns[at]}`)
      ] = 1;
  });
}

const gantt = { rows: [], begin: 0, end: STEP, chosen: null, view: null, told: null, more: 0 };

function makeRows() {
  const rows = data.devices.map((device, d) => ({
    title: device.name,
    device: d,
    height: DEVICE_ROW,
    items: [],
  }));
  bars.op.forEach((op, bar) =>
    rows[ops.device[op]].items.push({
      kind: "op",
      at: bar,
      begin: bars.start_ns[bar],
      end: bars.end_ns[bar],
    }),
  );
  idle.device.forEach((d, k) =>
    rows[d].items.push({ kind: "idle", at: k, begin: idle.start_ns[k], end: idle.end_ns[k] }),
  );
  const busy = (track) =>
    track.transfers.reduce((sum, k) => sum + transfers.end_ns[k] - transfers.start_ns[k], 0);
  const busiest = [...tracks].sort((a, b) => busy(b) - busy(a)).slice(0, MOST_TRACKS);
  gantt.more = tracks.length - busiest.length;
  for (const track of tracks.filter((one) => busiest.includes(one))) {
    rows.push({
      title: track.title,
      short: ends(track),
      height: LINK_ROW,
      items: track.transfers.map((k) => ({
        kind: "transfer",
        at: k,
        begin: transfers.start_ns[k],
        end: transfers.end_ns[k],
      })),
    });
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

// Labels a link by device numbers, for names that are too long.
function ends(track) {
  const [from, to] = [transfers.from, transfers.to].map((side) =>
    [...new Set(track.transfers.map((k) => side[k]))].sort((a, b) => a - b).join(", "),
  );
  return `device ${from} → ${to}`;
}

function ganttSection() {
  markCritical();
  const height = makeRows();
  const host = el("div", { class: "canvas" });
  gantt.told = el("div", { class: "told", "aria-live": "polite" });
  const tools = el(
    "div",
    { class: "tools" },
    ganttLegend(),
    el("span", { class: "space" }),
    button("−", () => zoomGantt(1 / 1.5), "zoom out"),
    button("+", () => zoomGantt(1.5), "zoom in"),
    button("Fit", fitGantt),
  );
  section(
    "when",
    "When",
    el(
      "p",
      {},
      `The simulated step takes ${nanoseconds(STEP)}${data.micro_batches > 1 ? ` for ${data.micro_batches} micro-batches` : ""}. ${idleSentence()}`,
    ),
    tools,
    host,
    gantt.told,
    el(
      "p",
      { class: "hint" },
      "Drag to move, click for details. With the chart in focus: left and right arrows go from bar to bar, up and down from row to row, + and − or the wheel zoom, 0 fits.",
      gantt.more ? ` The ${MOST_TRACKS} busiest of ${tracks.length} links are drawn.` : "",
    ),
    el("h3", {}, "Where the time of every device goes"),
    table(
      idleColumns(),
      data.devices.map((_, d) => d),
    ),
    criticalSummary(),
    numbers(`The critical path, ${plural(critical.bar.length, "part")}`, criticalColumns(), () => [
      ...critical.bar.keys(),
    ]),
    numbers(`All ${plural(transfers.bar.length, "transfer")}`, transferColumns(), () => [
      ...transfers.bar.keys(),
    ]),
  );
  gantt.view = surface(
    host,
    height,
    "timeline of devices and links; arrow keys go from bar to bar",
    drawGantt,
  );
  gantt.view.canvas.addEventListener("keydown", ganttKey);
  listenToGantt(gantt.view.canvas);
  tellChosen();
}

function ganttLegend() {
  const mark = el("span", { class: "key critical", "aria-hidden": "true" });
  const reasons = {
    producer: "waits for an op elsewhere",
    "link busy": "waits for a link",
    transfer: "waits for a transfer",
  };
  const host = "host busy";
  if (idle.why.includes(idle.whys.indexOf(host))) reasons[host] = "waits for the host thread";
  const found = Object.entries(reasons).map(([why, told]) =>
    el(
      "span",
      { class: "device" },
      el("span", { class: `key ${IDLE_STROKES[idle.whys.indexOf(why)]}`, "aria-hidden": "true" }),
      told,
    ),
  );
  return legend(
    el("span", { class: "device" }, mark, "on the critical path"),
    ...found,
    el(
      "span",
      { class: "device" },
      el("span", { class: "key", "aria-hidden": "true" }),
      "nothing left to do",
    ),
  );
}
