"use strict";
// A line chart in SVG from the data that series.py describes: curves that can be hidden, hovered and zoomed, by pointer or keys.

const SVG = "http://www.w3.org/2000/svg";

function make(name, attributes, ...children) {
  const plain = ["svg", "g", "path", "line", "rect", "text", "circle", "title", "clipPath", "defs"].includes(name);
  const node = plain ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// The six markers of style.MARKERS, as paths around (0, 0).
const MARKERS = [
  "M3.5 0A3.5 3.5 0 1 1-3.5 0A3.5 3.5 0 1 1 3.5 0Z",
  "M-3-3H3V3H-3Z",
  "M0-4L4 3H-4Z",
  "M0-4.5L4.5 0L0 4.5L-4.5 0Z",
  "M0 4L4-3H-4Z",
  "M-1.3-4H1.3V-1.3H4V1.3H1.3V4H-1.3V1.3H-4V-1.3H-1.3Z",
];

function number(value, form) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (form === "bytes") {
    for (const [unit, many] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (size >= many) return `${+(value / many).toPrecision(3)} ${unit}`;
    return `${value} B`;
  }
  if (size >= 1e7 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  return (+value.toPrecision(4)).toLocaleString("en");
}

class Axis {
  // Maps values to pixels; base 0 is a linear axis, 2 and 10 are logarithmic ones.
  constructor(low, high, from, to, base) {
    Object.assign(this, { base, from, to, low: this.go(low, base), high: this.go(high, base) });
    if (this.low === this.high) { this.low -= 0.5; this.high += 0.5; }
  }
  go(value, base) { return base ? Math.log(value) / Math.log(base) : value; }
  at(value) { return this.from + (this.go(value, this.base) - this.low) / (this.high - this.low) * (this.to - this.from); }
  back(pixel) {
    const place = this.low + (pixel - this.from) / (this.to - this.from) * (this.high - this.low);
    return this.base ? this.base ** place : place;
  }
  ticks(most) {
    const span = this.high - this.low;
    if (this.base) {
      const step = Math.max(1, Math.ceil(span / most)), parts = this.base === 10 && step === 1 ? (span < 1.2 ? [1, 1.5, 2, 3, 5, 7] : span < 3 ? [1, 2, 5] : [1]) : [1];
      const found = [];
      for (let power = Math.floor(this.low / step) * step; power <= this.high; power += step) {
        for (const part of parts) if (Math.abs(this.go(part * this.base ** power, this.base) - (this.low + this.high) / 2) <= span / 2 + 1e-9) found.push(+(part * this.base ** power).toPrecision(12));
      }
      if (found.length >= 3 || this.base === 2 && found.length >= 2) return found;
    }
    const low = this.base ? this.base ** this.low : this.low, high = this.base ? this.base ** this.high : this.high;
    const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((times) => times * power >= rough);
    const even = [];
    for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) even.push(+value.toPrecision(12));
    return even;
  }
}

class Chart {
  constructor(root, spec) {
    Object.assign(this, { root, spec, measure: spec.measures[0], zoom: null, papers: false, bars: true, focus: null });
    this.log = this.measure.log;
    spec.series.forEach((series, index) => { series.index = index; series.hidden = !series.shown; });
    root.replaceChildren();
    this.controls();
    this.svg = make("svg", { tabindex: 0, role: "group", "aria-label": `${spec.id} chart: arrow keys read points, plus and minus zoom, 0 resets` });
    this.legend = make("div", { class: "legend", role: "group", "aria-label": "curves" });
    this.others = make("div", { class: "others" });
    root.append(this.bar, this.svg, this.legend, this.others);
    this.keys();
    this.pointer();
    this.legends();
    const resized = () => { if (root.clientWidth && root.clientWidth !== this.width) this.draw(); };
    new ResizeObserver(() => requestAnimationFrame(resized)).observe(root);
    this.draw();
  }

  controls() {
    this.bar = make("div", { class: "controls" });
    const { spec } = this;
    if (spec.measures.length > 1) {
      this.pick = make("select", { class: "measure" }, ...spec.measures.map((one) => make("option", { value: one.id }, one.label)));
      this.pick.addEventListener("change", () => this.choose(this.pick.value));
      this.bar.append(make("label", {}, "show", this.pick));
    }
    const box = (name, words, change) => {
      const input = make("input", { type: "checkbox", class: name });
      input.addEventListener("change", () => change(input.checked));
      this.bar.append(make("label", {}, input, words));
      return input;
    };
    this.logBox = box("log", "log scale", (on) => { this.log = on; this.zoom = null; this.draw(); });
    this.logBox.checked = this.log;
    if (spec.series.some((series) => series.points.some((one) => Object.values(one.y).some((y) => y[1] !== null)))) {
      box("bars", "error bars", (on) => { this.bars = on; this.draw(); }).checked = true;
    }
    if (spec.papers && spec.series.some((series) => series.group)) {
      this.paperBox = box("papers", "papers’ curves", (on) => {
        this.papers = on;
        this.choose(on ? spec.papers : spec.measures[0].id);
      });
    }
    this.reset = make("button", { type: "button", class: "reset", hidden: "" }, "Reset zoom");
    this.reset.addEventListener("click", () => this.unzoom());
    this.bar.append(this.reset);
  }

  choose(id) {
    this.measure = this.spec.measures.find((one) => one.id === id);
    if (this.pick) this.pick.value = id;
    if (this.papers && id !== this.spec.papers) { this.papers = false; this.paperBox.checked = false; }
    this.log = this.measure.log;
    this.logBox.checked = this.log;
    this.zoom = null;
    this.legends();
    this.draw();
  }

  entry(series) {
    const swatch = make("svg", { viewBox: "0 0 30 14", "aria-hidden": "true" }, make("g", { class: series.group ? "paper" : "" }, ...this.sign(series)));
    const button = make("button", { type: "button", "aria-pressed": String(!series.hidden), "data-series": series.index }, swatch, series.label);
    button.addEventListener("click", () => {
      series.hidden = !series.hidden;
      button.setAttribute("aria-pressed", String(!series.hidden));
      this.draw();
    });
    return button;
  }

  sign(series) {
    const stroke = `var(--c${series.colour})`;
    return [
      make("path", { d: "M0 7H30", class: "curve", stroke, "stroke-dasharray": series.dash.join(" ") }),
      make("path", { d: MARKERS[series.marker % 6], class: "point", fill: stroke, stroke, transform: "translate(15 7)" }),
    ];
  }

  legends() {
    this.legend.replaceChildren(...this.spec.series.filter((series) => !series.group).map((series) => this.entry(series)));
    this.others.replaceChildren();
    if (!this.papers) return;
    for (const group of new Set(this.spec.series.map((series) => series.group).filter(Boolean))) {
      const members = this.spec.series.filter((series) => series.group === group);
      const inner = make("div", { class: "legend" }, ...members.map((series) => this.entry(series)));
      const open = members.some((series) => !series.hidden) ? { open: "" } : {};
      this.others.append(make("details", open, make("summary", {}, group), inner));
    }
  }

  visible() {
    return this.spec.series.filter((series) => !series.hidden && (!series.group || this.papers));
  }

  // What of a point is drawn: its place, its value with the ends of its bar, and a word where the value is no number.
  point(series, one) {
    const [y, low, high] = one.y[this.measure.id] || [null, null, null];
    return { series, one, x: this.measure.relative ? one.rx : one.x, y, low, high, note: one.n[this.measure.id] };
  }

  shown() {
    return this.visible().map((series) => series.points.map((one) => this.point(series, one)).filter((p) => (p.y !== null || p.note) && !(this.log && p.y !== null && p.y <= 0)));
  }

  extent(points) {
    const drawn = points.filter((p) => p.y !== null);
    const xs = points.map((p) => p.x), ys = drawn.flatMap((p) => this.bars ? [p.y, p.low, p.high] : [p.y]).filter((y) => y !== null && !(this.log && y <= 0));
    const edge = (values) => values.length ? [Math.min(...values), Math.max(...values)] : [1, 2];
    let [x0, x1] = edge(xs), [y0, y1] = edge(ys);
    if (this.log && y1 / y0 < 1.5) { const middle = Math.sqrt(y0 * y1); y0 = Math.min(y0, middle / 1.25); y1 = Math.max(y1, middle * 1.25); }
    if (this.log) { const room = (y1 / y0) ** 0.06; y0 /= room; y1 *= room; }
    else { const room = (y1 - y0 || Math.abs(y1) || 1) * 0.06; y0 -= room; y1 += room; }
    if (this.spec.log_x) { const room = (x1 / x0) ** 0.03; x0 /= room; x1 *= room; }
    return { x: [x0, x1], y: [y0, y1] };
  }

  draw() {
    const width = this.width = this.root.clientWidth || 640, height = Math.round(Math.min(440, Math.max(280, width * 0.55)));
    const lines = this.shown(), points = lines.flat();
    const extent = this.zoom || this.extent(points);
    const box = this.box = { left: 56, right: width - 14, top: 22, bottom: height - 42 };
    const X = this.X = new Axis(...extent.x, box.left, box.right, this.spec.log_x ? 2 : 0);
    const Y = this.Y = new Axis(...extent.y, box.bottom, box.top, this.log ? 10 : 0);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const clip = `clip-${this.spec.id}`;
    const frame = make("rect", { x: box.left, y: box.top - 8, width: box.right - box.left + 8, height: box.bottom - box.top + 8 });
    const grid = make("g", {}), inner = make("g", { "clip-path": `url(#${clip})` });
    for (const value of X.ticks(width < 500 ? 5 : 9)) {
      grid.append(make("line", { class: "grid", x1: X.at(value), x2: X.at(value), y1: box.top, y2: box.bottom }));
      grid.append(make("text", { x: X.at(value), y: box.bottom + 16, "text-anchor": "middle" }, (this.measure.relative ? "×" : "") + number(value)));
    }
    for (const value of Y.ticks(6)) {
      grid.append(make("line", { class: "grid", x1: box.left, x2: box.right, y1: Y.at(value), y2: Y.at(value) }));
      grid.append(make("text", { x: box.left - 6, y: Y.at(value) + 4, "text-anchor": "end" }, number(value, this.measure.form)));
    }
    grid.append(make("text", { class: "title", x: box.left - 50, y: 11 }, this.measure.label));
    grid.append(make("text", { class: "title", x: box.right, y: box.bottom + 34, "text-anchor": "end" }, this.measure.relative ? this.spec.rx : this.spec.x));
    const marks = this.measure.relative ? [{ x: 1, label: "training length" }] : this.spec.marks;
    marks.forEach((mark, order) => {
      const x = X.at(mark.x);
      if (x < box.left - 1 || x > box.right + 1) return;
      const late = x > (box.left + box.right) / 2;
      inner.append(make("line", { class: "mark", x1: x, x2: x, y1: box.top, y2: box.bottom }));
      inner.append(make("text", { class: "marked", x: x + (late ? -4 : 4), y: box.top + 8 + 14 * order, "text-anchor": late ? "end" : "start" }, mark.label));
    });
    this.placed = [];
    for (const line of lines) if (line.length) inner.append(this.curve(line));
    this.near = make("circle", { class: "near", r: 7, visibility: "hidden" });
    this.select = make("rect", { class: "select", visibility: "hidden" });
    this.svg.replaceChildren(make("defs", {}, make("clipPath", { id: clip }, frame)), grid, inner, this.near, this.select);
    this.reset.hidden = !this.zoom;
  }

  curve(line) {
    const { X, Y, box } = this, series = line[0].series, colour = `var(--c${series.colour})`;
    const group = make("g", { class: series.group ? "series paper" : "series", "data-series": series.index });
    let path = "", joined = false;
    for (const p of line) {
      const x = X.at(p.x), y = p.y === null ? (p.note === "∞" ? box.top : box.bottom) : Y.at(p.y);
      this.placed.push({ ...p, px: x, py: y });
      if (p.y === null) { joined = false; continue; }
      path += (joined ? "L" : "M") + x.toFixed(2) + " " + y.toFixed(2);
      joined = true;
      if (this.bars && p.low !== null && p.high !== null && !(this.log && p.low <= 0)) {
        group.append(make("line", { class: "band", stroke: colour, x1: x, x2: x, y1: Y.at(p.low), y2: Y.at(p.high) }));
      }
    }
    group.append(make("path", { class: "curve", d: path || "M0 0", stroke: colour, "stroke-dasharray": series.dash.join(" ") }));
    const many = line.length > 24;
    for (const p of this.placed) {
      if (p.series !== series) continue;
      if (p.y === null) group.append(make("text", { x: p.px, y: p.py + 10, "text-anchor": "middle", class: "note" }, p.note));
      else if (!many) group.append(make("path", { class: "point", d: MARKERS[series.marker % 6], fill: colour, stroke: colour, transform: `translate(${p.px} ${p.py})` }));
    }
    return group;
  }

  // Where a pointer is, in the drawing's own units.
  place(event) {
    const frame = this.svg.getBoundingClientRect(), scale = this.width / frame.width;
    return [(event.clientX - frame.left) * scale, (event.clientY - frame.top) * scale];
  }

  pointer() {
    let from = null;
    const inside = ([x, y]) => [Math.min(Math.max(x, this.box.left), this.box.right), Math.min(Math.max(y, this.box.top), this.box.bottom)];
    this.svg.addEventListener("pointerdown", (event) => { if (event.button === 0) from = inside(this.place(event)); });
    this.svg.addEventListener("pointermove", (event) => {
      const here = this.place(event);
      if (!from) { this.hover(here); return; }
      const [x, y] = inside(here), touch = event.pointerType === "touch";
      if (Math.hypot(x - from[0], y - from[1]) < 6) return;
      this.svg.setPointerCapture(event.pointerId);
      hideTip();
      const flat = touch || Math.abs(y - from[1]) < 12;
      const top = flat ? this.box.top : Math.min(y, from[1]), bottom = flat ? this.box.bottom : Math.max(y, from[1]);
      const area = { x: Math.min(x, from[0]), y: top, width: Math.abs(x - from[0]), height: bottom - top, visibility: "visible" };
      for (const [key, value] of Object.entries(area)) this.select.setAttribute(key, value);
      this.area = area;
    });
    this.svg.addEventListener("pointerup", (event) => {
      const { area } = this;
      if (from && area && area.width > 8) {
        this.zoom = { x: [this.X.back(area.x), this.X.back(area.x + area.width)], y: [this.Y.back(area.y + area.height), this.Y.back(area.y)] };
        this.draw();
      } else if (from) this.hover(this.place(event));
      from = this.area = null;
      this.select.setAttribute("visibility", "hidden");
    });
    this.svg.addEventListener("pointercancel", () => { from = this.area = null; this.select.setAttribute("visibility", "hidden"); });
    this.svg.addEventListener("pointerleave", () => { if (!from) this.leave(); });
    this.svg.addEventListener("dblclick", () => this.unzoom());
  }

  hover([x, y]) {
    let best = null, least = 32;
    for (const p of this.placed) {
      if (p.px < this.box.left - 2 || p.px > this.box.right + 8) continue;
      const far = Math.hypot(p.px - x, p.py - y);
      if (far < least) { least = far; best = p; }
    }
    if (best) this.tell(best); else this.leave();
  }

  says(measure, one) {
    const [y, low, high] = one.y[measure.id] || [null, null, null];
    const error = low === null || high === null ? "" : ` ± ${number(+((high - low) / 2).toPrecision(2), measure.form)}`;
    return `${measure.label}: ${y === null ? one.n[measure.id] : number(y, measure.form)}${error}`;
  }

  tell(p) {
    this.near.setAttribute("cx", p.px);
    this.near.setAttribute("cy", p.py);
    this.near.setAttribute("visibility", "visible");
    const where = `${this.spec.x.split(" ")[0]} ${p.one.x.toLocaleString("en")}`;
    const values = [this.says(this.measure, p.one)], [first] = this.spec.measures;
    if (this.measure.relative && p.one.y[first.id] && p.one.y[first.id][0] !== p.y) values.push(this.says(first, p.one));
    const frame = this.svg.getBoundingClientRect(), scale = frame.width / this.width;
    showTip([p.series.label, where, ...values, ...p.one.tip], frame.left + p.px * scale, frame.top + p.py * scale);
  }

  leave() {
    this.near.setAttribute("visibility", "hidden");
    hideTip();
  }

  unzoom() {
    this.zoom = null;
    this.leave();
    this.draw();
  }

  step(line, point) {
    const lines = this.shown().filter((one) => one.length);
    if (!lines.length) return;
    const at = this.focus || [0, -1];
    const row = (at[0] + line + lines.length) % lines.length;
    const column = Math.min(Math.max(at[1] + point, 0), lines[row].length - 1);
    this.focus = [row, column];
    const wanted = lines[row][column].one;
    this.tell(this.placed.find((p) => p.one === wanted));
  }

  scale(times) {
    const { X, Y, box } = this;
    const cut = (axis, from, to) => {
      const middle = (from + to) / 2, half = (to - from) / 2 * times;
      return [axis.back(middle - half), axis.back(middle + half)];
    };
    this.zoom = { x: cut(X, box.left, box.right), y: cut(Y, box.bottom, box.top) };
    this.draw();
  }

  keys() {
    const does = {
      ArrowLeft: () => this.step(0, -1), ArrowRight: () => this.step(0, 1), ArrowUp: () => this.step(-1, 0), ArrowDown: () => this.step(1, 0),
      "+": () => this.scale(0.6), "=": () => this.scale(0.6), "-": () => this.scale(1 / 0.6), 0: () => this.unzoom(), Escape: () => this.unzoom(),
    };
    this.svg.addEventListener("keydown", (event) => {
      const action = does[event.key];
      if (!action || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      action();
    });
    this.svg.addEventListener("blur", () => { this.focus = null; this.leave(); });
  }
}
