// Mouse and keyboard input of the timeline, and the text on the selection.

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
  if (!row || x < gutter()) return null;
  const [at, near] = [xToTime(x), (3 * (gantt.end - gantt.begin)) / gantt.view.width];
  const away = (item) => Math.max(item.begin - at, at - item.end, 0);
  const item = row.items
    .filter((one) => away(one) <= near)
    .sort((a, b) => away(a) - away(b) || a.end - a.begin - (b.end - b.begin))[0];
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

const middleOfChosen = () =>
  gantt.chosen ? (gantt.chosen.item.begin + gantt.chosen.item.end) / 2 : undefined;

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
  if (other)
    choose({
      row: other,
      item: other.items.reduce((best, one) => (away(one) < away(best) ? one : best)),
    });
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
    moveGantt(
      held.begin - ((event.offsetX - held.x) / (gantt.view.width - gutter())) * length,
      length,
    );
  });
  canvas.addEventListener("pointerup", (event) => {
    if (held && !held.moved) choose(itemAt(event.offsetX, event.offsetY));
    held = null;
  });
  canvas.addEventListener("pointercancel", () => (held = null));
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (document.activeElement !== canvas && !event.ctrlKey) return; // let the page scroll
      event.preventDefault();
      zoomGantt(Math.exp(-event.deltaY / 400), xToTime(event.offsetX));
    },
    { passive: false },
  );
}

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

const barButton = (bar) =>
  button(breakable(barName(bar)), () => reveal(bars.op[bar]), `show ${barName(bar)} in the graph`);
const tellOp = (item, row) => [
  deviceLabel(row.device),
  " runs ",
  barButton(item.at),
  isCritical[item.at] ? ", on the critical path" : "",
];

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
  if (producer < 0 && idle.reader[k] >= 0)
    return [who, " is idle: it waits until its host thread issues ", barButton(idle.reader[k])];
  if (producer < 0) return [who, " is idle: it has nothing left to do"];
  const from = deviceName(deviceOfBar(producer));
  const next = [", which ", barButton(idle.reader[k]), " reads"];
  switch (idle.whys[idle.why[k]]) {
    case "producer":
      return [who, ` is idle: it waits until ${from} has made `, barButton(producer), ...next];
    case "host busy":
      return [
        who,
        " is idle: it waits until its host thread copies ",
        barButton(producer),
        ` of ${from}`,
        ...next,
      ];
    case "link busy":
      return [
        who,
        ` is idle: it waits for `,
        barButton(producer),
        ` of ${from}`,
        ...next,
        ", behind the transfer of ",
        barButton(holder),
      ];
    default:
      return [
        who,
        ` is idle: it waits while `,
        barButton(producer),
        ` comes from ${from}`,
        ...next,
      ];
  }
}
