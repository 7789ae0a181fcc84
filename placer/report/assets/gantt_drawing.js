// Draws the timeline.

const timeToX = (ns) =>
  gutter() + ((ns - gantt.begin) / (gantt.end - gantt.begin)) * (gantt.view.width - gutter() - 12);
const xToTime = (x) =>
  gantt.begin + ((x - gutter()) / (gantt.view.width - gutter() - 12)) * (gantt.end - gantt.begin);

function drawGantt(view, colours) {
  const { context, width, height } = view;
  context.fillStyle = colours.surface;
  context.fillRect(0, 0, width, height);
  context.save();
  context.beginPath();
  context.rect(gutter(), 0, width - gutter(), height);
  context.clip();
  drawTimeAxis(context, colours, height);
  for (const row of gantt.rows)
    for (const item of row.items) drawItem(context, row, item, colours, width);
  if (gantt.chosen) frameChosen(context, colours);
  context.restore();
  context.textBaseline = "middle";
  for (const row of gantt.rows) nameRow(context, row, colours);
}

function drawTimeAxis(context, colours, height) {
  const { unit, tell } = inUnit(gantt.end / 1e9, TIMES);
  context.font = `12px ${FONT}`;
  context.textBaseline = "alphabetic";
  for (const at of ticks(gantt.begin / 1e9, gantt.end / 1e9, Math.max(2, (gantt.view.width - gutter()) / 130))) {
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
  const left = Math.max(timeToX(item.begin), gutter() - 4);
  const right = Math.min(timeToX(item.end), width + 4);
  if (right <= gutter() || left >= width) return;
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
    labelDevice(
      context,
      device,
      fitted(context, opLabel(bars.op[item.at]), wide - 8),
      left + 4,
      row.top + row.height / 2 + 0.5,
    );
  }
}

function frameChosen(context, colours) {
  const { row, item } = gantt.chosen;
  const left = timeToX(item.begin);
  context.strokeStyle = colours.accent;
  context.lineWidth = 3;
  context.strokeRect(
    left - 1,
    row.top - 1,
    Math.max(timeToX(item.end) - left, 2) + 2,
    row.height + 2,
  );
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
  const fits = row.device != null || context.measureText(row.title).width <= gutter() - left - 8;
  context.fillText(
    fitted(context, fits ? row.title : row.short, gutter() - left - 8),
    left,
    middle + 0.5,
  );
}
