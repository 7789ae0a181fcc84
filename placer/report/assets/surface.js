// Canvases that are sharp, as wide as their hosts, and follow the theme.

// A canvas as wide as its host, sharp on every screen, drawn anew when size or theme change.
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

// Calls now and whenever the width of an element or the theme changes.
function watch(host, draw) {
  let width = -1;
  new ResizeObserver(() => {
    if (host.clientWidth !== width) draw();
    width = host.clientWidth;
  }).observe(host);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

// As much of a text as fits: without the modules in front first, its end kept in any case.
function fitted(context, text, width) {
  const fits = (part) => context.measureText(part).width <= width;
  if (fits(text)) return text;
  const [path, kind] = text.includes(" · ") ? text.split(" · ") : [text, ""];
  const parts = path.split(".");
  for (let from = 1; from < parts.length; from++) {
    const rest = `…${parts.slice(from).join(".")}${kind && ` · ${kind}`}`;
    if (fits(rest) && rest.length > 3) return rest;
  }
  if (kind) return fitted(context, kind, width);
  let low = 0;
  let high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (fits(`…${text.slice(text.length - middle)}`)) low = middle;
    else high = middle - 1;
  }
  return low ? `…${text.slice(text.length - low)}` : "";
}

// A name of an op or module that may be broken between its parts.
function breakable(name) {
  const parts = name.split(/(?<=[.:/@_])/);
  return el("span", {}, ...parts.flatMap((part, k) => (k ? [el("wbr"), part] : [part])));
}
