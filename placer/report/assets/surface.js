// Canvases that follow size, resolution and theme of the page.

// A canvas as wide as its host, redrawn when size or theme change.
function surface(host, height, label, draw) {
  const canvas = el("canvas", { tabindex: "0", role: "application", "aria-label": label });
  host.append(canvas);
  const view = { canvas, width: 0, height, context: canvas.getContext("2d"), redraw };
  let waiting = false;
  function paint() {
    waiting = false;
    const ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${view.height}px`;
    view.width = host.clientWidth;
    if (!view.width) return;
    canvas.width = Math.round(view.width * ratio);
    canvas.height = Math.round(view.height * ratio);
    view.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    view.context.clearRect(0, 0, view.width, view.height);
    draw(view, theme());
  }
  function redraw() {
    if (!waiting) requestAnimationFrame(paint);
    waiting = true;
  }
  watch(host, redraw);
  return view;
}

// Calls `draw` now and whenever the element's width or the theme changes.
function watch(host, draw) {
  let width = -1;
  new ResizeObserver(() => {
    if (host.clientWidth !== width) draw();
    width = host.clientWidth;
  }).observe(host);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

const SHORTEST = 5; // labels with fewer characters are not drawn

// Shortens a label to fit: last modules and op, then the op alone, cut in the middle.
function fitted(context, label, width) {
  const fits = (part) => context.measureText(part).width <= width;
  if (fits(label)) return label;
  const [path, kind] = label.includes(" · ") ? label.split(" · ") : [label, ""];
  const parts = path.split(".");
  for (let from = 1; from < parts.length; from++) {
    const rest = `…${parts.slice(from).join(".")}${kind && ` · ${kind}`}`;
    if (fits(rest)) return rest.length < SHORTEST ? "" : rest;
  }
  const last = kind || parts.at(-1);
  for (let kept = last.length; kept >= SHORTEST - 1; kept--) {
    const begin = Math.ceil(kept / 2);
    const cut =
      kept === last.length ? last : `${last.slice(0, begin)}…${last.slice(begin - kept)}`;
    if (fits(cut)) return cut;
  }
  return "";
}

// An op or module name that may wrap between its parts.
function breakable(name) {
  const parts = name.split(/(?<=[.:/@_])/);
  return el("span", {}, ...parts.flatMap((part, k) => (k ? [el("wbr"), part] : [part])));
}
