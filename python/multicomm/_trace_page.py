"""The page around the picture of a timeline: its style, and what makes it zoom."""

from __future__ import annotations

STYLE = """
body { margin: 0; font: 13px system-ui, sans-serif; color: #222; background: #fff; }
header { padding: 10px 16px 4px; } h1 { font-size: 16px; margin: 0 0 4px; } header p { margin: 2px 0; color: #555; }
svg { display: block; width: 100%; height: auto; font-family: system-ui, sans-serif; cursor: grab; user-select: none; }
#tip { position: fixed; display: none; max-width: 460px; padding: 6px 9px; background: #222; color: #fff;
  border-radius: 4px; white-space: pre-line; pointer-events: none; font-size: 12px; z-index: 1; }
#plot g:hover { stroke: #000; stroke-width: 1px; }
"""

# Bars are stretched by one transform; what must keep its shape (labels, the axis) is placed anew.
SCRIPT = """
const by_name = name => document.getElementById(name);
const svg = by_name("picture"), plot = by_name("plot"), tip = by_name("tip"), axis = by_name("axis");
const labels = [...document.querySelectorAll("#labels text")];
const left = +svg.dataset.left, width = +svg.dataset.width, span = +svg.dataset.span, bottom = +svg.dataset.bottom;
let zoom = 1, shift = 0;  // of the plot, in pixels of the drawing
for (const title of plot.querySelectorAll("title")) {
  title.parentNode.dataset.tip = title.textContent;
  title.remove();
}
function unit(us) { return us >= 1e6 ? [1e6, "s"] : us >= 1e3 ? [1e3, "ms"] : [1, "us"]; }
function draw() {
  zoom = Math.min(Math.max(zoom, 1), 1e6);
  shift = Math.min(Math.max(shift, width * (1 - zoom)), 0);
  plot.setAttribute("transform", `translate(${left + shift} 0) scale(${zoom} 1)`);
  for (const label of labels) {
    const from = Math.max(+label.dataset.x * zoom + shift, 0), to = Math.min(+label.dataset.e * zoom + shift, width);
    const shown = to - from > +label.dataset.n * 5.6 + 6;
    label.style.display = shown ? "" : "none";
    if (shown) label.setAttribute("x", left + from + 4);
  }
  const seen = span / zoom, first = -shift / width * seen;
  let step = 10 ** Math.floor(Math.log10(seen / 10));
  for (const factor of [2, 2.5, 2]) if (seen / step > 14) step *= factor;
  const [one, name] = unit(step);
  const font = 'text-anchor="middle" font-size="11" fill="#555"';
  let text = "";
  for (let t = Math.ceil(first / step) * step; t <= first + seen; t += step) {
    const x = left + (t - first) / seen * width, digits = Math.max(0, -Math.floor(Math.log10(step / one) + 1e-9));
    text += `<line x1="${x}" x2="${x}" y1="22" y2="${bottom}" stroke="#ddd"/>` +
      `<text x="${x}" y="16" ${font}>${(t / one).toFixed(digits)} ${name}</text>`;
  }
  axis.innerHTML = text;
}
function place(event) {
  const box = svg.getBoundingClientRect();
  return (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width - left;
}
function zoom_at(x, factor) {
  const before = zoom;
  zoom = Math.min(Math.max(zoom * factor, 1), 1e6);
  shift = x - (x - shift) * zoom / before;
  draw();
}
let held = null, at = width / 2;
svg.addEventListener("wheel", event => {
  if (!event.ctrlKey) return;
  event.preventDefault();
  zoom_at(place(event), Math.exp(-event.deltaY / 300));
}, { passive: false });
svg.addEventListener("mousedown", event => { held = place(event) - shift; event.preventDefault(); });
addEventListener("mouseup", () => held = null);
addEventListener("mousemove", event => {
  at = place(event);
  if (held !== null) { shift = at - held; draw(); }
  const over = event.target.closest ? event.target.closest("[data-tip]") : null;
  tip.style.display = over && held === null ? "block" : "none";
  if (!over) return;
  tip.textContent = over.dataset.tip;
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
});
svg.addEventListener("dblclick", () => { zoom = 1; shift = 0; draw(); });
addEventListener("keydown", event => {
  if (event.key === "w") zoom_at(at, 1.5);
  if (event.key === "s") zoom_at(at, 1 / 1.5);
  if (event.key === "a") { shift += width / 8; draw(); }
  if (event.key === "d") { shift -= width / 8; draw(); }
});
draw();
"""
