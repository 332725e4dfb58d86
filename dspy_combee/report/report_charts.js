"use strict";
// Elements, numbers and charts: what report.js, which follows in the same script, draws the page with.
const SVG = "http://www.w3.org/2000/svg";

// Making elements -------------------------------------------------------------------------------------------

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
let ids = 0;
const newId = (name) => `${name}-${++ids}`;

// Numbers -----------------------------------------------------------------------------------------------------

const none = "\u2013";
function figure(x, digits = 3) {
  if (x === null || x === undefined) return none;
  if (Number.isInteger(x)) return x.toLocaleString("en-US");
  if (x !== 0 && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e6)) return x.toExponential(1);
  return Number(x.toPrecision(Math.max(digits, Math.ceil(Math.log10(Math.abs(x) + 1))))).toLocaleString("en-US", { maximumFractionDigits: 6 });
}
function short(x) {
  return x >= 1e6 ? `${figure(x / 1e6)} M` : figure(x);
}
function time(s) {
  if (s === null || s === undefined) return none;
  if (s > 0 && s < 1) return `${figure(s, 2)} s`;
  if (s >= 3600) return `${figure(s / 3600)} h`;
  return s >= 120 ? `${figure(s / 60)} min` : `${figure(s)} s`;
}
function dollars(x) {
  if (x === null || x === undefined) return none;
  return x === 0 ? "$0" : x >= 1 ? `$${x.toFixed(2)}` : `$${Number(x.toPrecision(3))}`;
}
const many = (n, word) => `${figure(n)} ${word}${n === 1 ? "" : "s"}`;

// Charts ------------------------------------------------------------------------------------------------------

function linearTicks(low, high, wanted) {
  const raw = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-9) + 1e-12; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}
function logTicks(low, high, wanted) {
  for (const digits of [[1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
      for (const d of digits) if (d * 10 ** e >= low * 0.999 && d * 10 ** e <= high * 1.001) ticks.push(Number((d * 10 ** e).toPrecision(6)));
    if (ticks.length <= wanted || digits.length === 1) return ticks;
  }
  return [];
}
function scale(values, log, from, to) {
  let low = Math.min(...values), high = Math.max(...values);
  if (log) {
    low /= 1.25; high *= 1.25;
    const a = Math.log(low), b = Math.log(high);
    return { low, high, at: (v) => from + ((Math.log(v) - a) / (b - a)) * (to - from) };
  }
  const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  low = low >= 0 && low - room < 0 ? 0 : low - room; high += room;
  return { low, high, at: (v) => from + ((v - low) / (high - low)) * (to - from) };
}
// Draws now and again whenever the place gets another width.
function drawn(place, draw) {
  let width = 0;
  new ResizeObserver(() => {
    const now = Math.floor(place.clientWidth);
    if (now > 0 && now !== width) { width = now; draw(width); }
  }).observe(place);
  return place;
}
function mark(kind, x, y, title) {
  const shape = kind === "rejected"
    ? svg("circle", { class: "dot-rejected", cx: x, cy: y, r: 3 })
    : svg("circle", { class: `dot-${kind}`, cx: x, cy: y, r: kind === "step" ? 3 : 5 });
  if (title) shape.append(svg("title", {}, title));
  return shape;
}
function chart(spec) {
  const place = el("div", { class: "chart" });
  return drawn(place, (width) => {
    const height = 256, left = 52, right = width - 14, top = 28, bottom = height - 42;
    const all = [...spec.lines.flatMap((l) => l.points), ...spec.dots];
    const x = scale([...all.map((p) => p[0]), ...(spec.choice ? [spec.choice] : [])], spec.log, left, right);
    const y = scale(all.map((p) => p[1]), spec.log, bottom, top);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": spec.label });
    const ticks = spec.log ? logTicks : linearTicks, whole = (v) => !spec.whole || Number.isInteger(v);
    for (const v of ticks(y.low, y.high, 5).filter(whole)) {
      picture.append(svg("line", { class: "grid", x1: left, x2: right, y1: y.at(v), y2: y.at(v) }));
      picture.append(svg("text", { x: left - 7, y: y.at(v) + 4, "text-anchor": "end" }, figure(v)));
    }
    for (const v of ticks(x.low, x.high, Math.max(3, Math.floor(width / 80))).filter(whole))
      picture.append(svg("text", { x: x.at(v), y: bottom + 17, "text-anchor": "middle" }, figure(v)));
    picture.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
    picture.append(svg("text", { x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, spec.x));
    picture.append(svg("text", { x: 0, y: 12 }, spec.y));
    if (spec.choice) {
      const at = x.at(spec.choice), over = at > (left + right) / 2;
      picture.append(svg("line", { class: "choice", x1: at, x2: at, y1: top, y2: bottom }));
      picture.append(svg("text", { class: "choice-label", x: at + (over ? -6 : 6), y: top + 10, "text-anchor": over ? "end" : "start" }, `n = ${spec.choice}`));
    }
    for (const line of spec.lines) {
      const path = line.points.map((p, i) => {
        const to = `${x.at(p[0]).toFixed(1)} ${y.at(p[1]).toFixed(1)}`;
        return i === 0 ? `M${to}` : line.stairs ? `H${x.at(p[0]).toFixed(1)}V${y.at(p[1]).toFixed(1)}` : `L${to}`;
      });
      picture.append(svg("path", { class: line.kind, d: path.join("") }));
    }
    for (const [px, py, kind, title] of spec.dots) picture.append(mark(kind, x.at(px), y.at(py), title));
    place.replaceChildren(picture);
  });
}
function legend(...entries) {
  return el("ul", { class: "chart legend" }, entries.map(([kind, text]) => {
    const line = kind === "series" || kind === "fit" || kind === "choice";
    const key = line ? svg("path", { class: kind, d: "M1 6H21" }) : mark(kind, 11, 6);
    return el("li", {}, svg("svg", { viewBox: "0 0 22 12", "aria-hidden": "true" }, key), text);
  }));
}
