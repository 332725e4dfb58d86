// The page. All text of the run reaches it as text nodes: nothing here parses HTML.
const data = JSON.parse(document.getElementById("data").textContent);

// Parts of the page -------------------------------------------------------------------------------------------

function section(title, ...children) {
  const id = newId("title");
  return el("section", { "aria-labelledby": id }, el("h2", { id }, title), children);
}
function totals() {
  const t = data.totals;
  const tile = (name, value, note) => el("div", { class: "tile" }, el("dt", {}, name), el("dd", {}, value, note && el("small", {}, note)));
  return el("dl", { class: "tiles" },
    t.best !== null && tile("Best score", figure(t.best), t.first !== t.best && `after the first step ${figure(t.first)}`),
    tile("Steps", figure(t.steps), `${figure(t.accepted)} accepted`),
    tile("Metric calls", figure(t.metric_calls)),
    tile("Time", time(t.seconds)),
    tile("Reflection calls", figure(t.reflection_calls)),
    tile("Tokens", short(t.tokens), "without validation"),
    tile("Cost", t.cost === null ? "unknown" : dollars(t.cost), t.cost === null ? "some calls told none" : "without validation"));
}
function scores() {
  const validated = data.scores.filter((s) => s.best !== null);
  const value = validated.length ? (s) => s.best : (s) => s.minibatch;
  const shown = data.scores.filter((s) => value(s) !== null);
  if (!shown.length) return null;
  const picture = (key, x, unit) => chart({
    x, y: "score", label: `Score over ${unit}: from ${figure(value(shown[0]))} to ${figure(value(shown[shown.length - 1]))} in ${many(shown.length, "step")}`,
    lines: [{ kind: "series", stairs: validated.length > 0, points: shown.map((s) => [s[key], value(s)]) }],
    dots: shown.map((s) => {
      const at = s.accepted && s.validation !== null ? s.validation : value(s);
      return [s[key], at, s.accepted ? "accepted" : "rejected", `step ${s.iteration}: ${s.accepted ? "accepted, " : "not accepted, score stays "}${figure(at)}`];
    }),
  });
  const what = validated.length ? "best mean score on the validation examples" : "mean score on the step's minibatch, before the change (no validation examples)";
  const keys = () => legend(["series", what], ["accepted", "accepted"], ["rejected", "not accepted"]);
  return el("div", { class: "pair charts" },
    section("Score over metric calls", picture("metric_calls", "metric calls", "metric calls"), keys()),
    section("Score over time", picture("seconds", "seconds", "time"), keys()));
}
function delay() {
  const d = data.delay, per = d.num_examples === null ? "seconds per example" : `seconds per epoch of ${figure(d.num_examples)} examples`;
  if (d.choice === null && new Set(d.steps.map(([n]) => n)).size < 2) return null;
  const dots = (points, kind) => points.filter((p) => p[1] > 0).map(([n, s]) => [n, s, kind, `n = ${n}: ${figure(s)} ${per}`]);
  return section("Delay curve",
    chart({
      log: true, x: "minibatch size n (both axes logarithmic)", y: per, choice: d.choice,
      label: `Delay curve: ${per} over the minibatch size${d.choice === null ? "" : `, chosen n = ${d.choice}`}`,
      lines: d.line.length ? [{ kind: "fit", points: d.line }] : [],
      dots: [...dots(d.steps, "step"), ...dots(d.medians, "median")],
    }),
    legend(["step", "a step"], ...(d.medians.length ? [["median", "median of a size, used in the fit"]] : []),
      ...(d.line.length ? [["fit", "fit"]] : []), ...(d.choice === null ? [] : [["choice", "chosen n"]])),
    d.reason && el("p", { class: "soft small" }, d.reason));
}
function table(label, heads, rows, kind) {
  return el("table", { class: kind, "aria-label": label },
    el("thead", {}, el("tr", {}, heads.map(([text, type]) => el("th", { scope: "col", class: type }, text)))),
    el("tbody", {}, rows));
}
// A cell; its label stands beside it where the table is shown as cards.
const cell = (label, value, type) => el("td", { "data-label": label || null, class: type }, value);
const priced = data.steps.some((s) => s.cost !== null);
const costHead = priced ? [["Cost", "number"]] : [];
function phases() {
  const most = Math.max(...data.phases.map((p) => p.seconds), 1e-9);
  const rows = data.phases.map((p) => el("tr", {},
    el("td", { class: "wide" }, p.name),
    el("td", { class: "bar wide" }, svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("rect", { x: 0, y: 0, width: (100 * p.seconds) / most, height: 10 }))),
    cell("time", time(p.seconds), "number"),
    cell("tokens", p.usage ? short(p.usage.input_tokens + p.usage.output_tokens) : none, "number"),
    priced && cell("cost", p.usage ? dollars(p.usage.cost) : none, "number")));
  if (!rows.length) return null;
  return section("Time and money by phase",
    table("Time and money by phase", [["Phase"], [""], ["Time", "number"], ["Tokens", "number"], ...costHead], rows, "cards"),
    data.phases.some((p) => !p.usage) && el("p", { class: "soft small" }, "Step records hold no tokens and no cost of validation passes."));
}

// Steps -------------------------------------------------------------------------------------------------------

const HEADS = [["Step"], ["n", "number"], ["k", "number"], ["p", "number"], ["Before", "number"], ["After", "number"], ["Outcome"],
  ["Rollouts", "number"], ["Reflection", "number"], ["Validation", "number"], ["Calls", "number"], ["Tokens", "number"], ...costHead];
function steps() {
  return section("Steps",
    el("p", { class: "soft small" }, "Before and after: mean scores on the step's minibatch. Calls: reflection calls. Open a step to see its tree and what it changed."),
    table("Steps", HEADS, data.steps.flatMap(stepRows), "cards"));
}
function outcome(step) {
  if (!step.accepted) return [el("span", { class: "badge" }, "not accepted"), " ", el("span", { class: "soft small" }, step.reason)];
  const score = step.validation === null ? "" : `, validation ${figure(step.validation)}`;
  return [el("span", { class: "badge good" }, "accepted"), " ", el("span", { class: "soft small" }, `candidate ${step.candidate}${score}`, step.reason && `; ${step.reason}`)];
}
function stepRows(step) {
  const id = newId("step"), place = el("td", { colspan: HEADS.length });
  const detail = el("tr", { class: "detail", id, hidden: true }, place);
  const button = el("button", { type: "button", class: "open number-button", "aria-expanded": "false", "aria-controls": id, onclick: toggle }, `Step ${step.iteration}`);
  function toggle() {
    if (!place.childNodes.length) fill(place, {}, stepDetail(step));
    detail.hidden = !detail.hidden;
    button.setAttribute("aria-expanded", String(!detail.hidden));
  }
  const phase = (name) => (step.shares ? "shared" : time(step.phases[name]));
  const row = el("tr", {}, el("td", { class: "wide head" }, button),
    cell("n", figure(step.n), "number"), cell("k", figure(step.k), "number"), cell("p", figure(step.p), "number"),
    cell("before", figure(step.before), "number"), cell("after", figure(step.after), "number"),
    el("td", { class: "wide head" }, outcome(step)),
    cell("rollouts", phase("rollouts"), "number"), cell("reflection", phase("reflection"), "number"), cell("validation", phase("validation"), "number"),
    cell("calls", figure(step.reflection_calls), "number"), cell("tokens", step.shares ? "shared" : short(step.tokens), "number"),
    priced && cell("cost", step.shares ? "shared" : dollars(step.cost), "number"));
  return [row, detail];
}
function stepDetail(step) {
  const facts = [`Candidate ${step.parent} was changed${step.candidate === null ? "" : `, into candidate ${step.candidate}`}.`,
    step.size_reason && `Minibatch size: ${step.size_reason}.`, step.shares && "It shares its time and tokens with the other proposals of the iteration."];
  return [el("p", {}, facts.filter(Boolean).join(" ")),
    step.components.map((component) => el("div", {}, componentDetail(step, component))),
    step.components.length === 0 && el("p", { class: "soft" }, "No reflection calls."),
    step.reflections.length > 0 && reflections(step)];
}
const exampleOf = (step, component, position) => step.examples[component.sources[position]] ?? "?";
function componentDetail(step, component) {
  const panel = el("div", { id: newId("node"), class: "card", role: "region", "aria-label": "Selected call" },
    el("p", { class: "soft" }, "Select a call of the tree to read it."));
  const lost = component.lost.map((position) => `r${position} (example ${exampleOf(step, component, position)})`);
  return [el("h3", {}, `Component ${component.name}`),
    component.error && el("p", { class: "error" }, `No proposal: ${component.error}`),
    component.nodes.length > 0 && [
      el("p", { class: "soft small" }, `${many(component.sources.length, "record")}, ${many(component.groups, "group")}, each record used ${many(component.copies, "time")}.`),
      tree(step, component, panel), treeLegend(component), panel],
    component.nodes.length > 0 && component.sources.length > 0 && el("p", { class: "small above" }, lost.length === 0
      ? "Every record reached a call that the proposal was made of."
      : `Records that reached no surviving call (${lost.length} of ${component.sources.length}): ${lost.join(", ")}`),
    changes(component)];
}
function treeLegend(component) {
  const kinds = [["1.0", "call", "call"], ["1.0", "call failed", "failed"], ["1.0", "call unused", "not in the proposal"]];
  const there = [true, component.nodes.some((n) => n.error), component.nodes.some((n) => !n.survives && !n.error)];
  return el("ul", { class: "legend tree" }, kinds.filter((_, i) => there[i]).map(([, kind, text]) => el("li", {},
    svg("svg", { viewBox: "0 0 22 12", "aria-hidden": "true" }, svg("g", { class: kind }, svg("rect", { x: 2, y: 1, width: 18, height: 10, rx: 4 }))), text)),
    component.sources.length > 0 && el("li", {}, svg("svg", { viewBox: "0 0 22 12", "aria-hidden": "true" }, svg("circle", { class: "record", cx: 11, cy: 6, r: 3.5 })), "record"),
    component.lost.length > 0 && el("li", {}, svg("svg", { viewBox: "0 0 22 12", "aria-hidden": "true" }, svg("circle", { class: "record lost", cx: 11, cy: 6, r: 3.5 })), "record that was lost"));
}
function tree(step, component, panel) {
  const place = el("div", { class: "tree", role: "group", "aria-label": `Tree of ${component.name}: the last call on top, records at the bottom` });
  const levels = [...component.levels].reverse(), byId = new Map(component.nodes.map((n) => [n.id, n]));
  const lost = new Set(component.lost);
  const kind = (n) => `call${n.error ? " failed" : n.survives ? "" : " unused"}`;
  const facts = (n) => `Call ${n.id}: reads ${many(n.inputs.length, "input")}, ${time(n.seconds)}${n.error ? ", failed" : n.survives ? "" : ", not in the proposal"}`;
  let chosen = null;
  function choose(id) {
    chosen = id;
    for (const shape of place.querySelectorAll("[data-node]")) shape.setAttribute("aria-pressed", String(shape.dataset.node === id));
    for (const edge of place.querySelectorAll("[data-to]")) {
      edge.classList.toggle("on", edge.dataset.to === id);
      if (edge.dataset.to === id) edge.parentNode.append(edge);  // Above the others.
    }
    const read = new Set(byId.get(id).inputs);
    for (const dot of place.querySelectorAll("[data-record]")) dot.classList.toggle("on", read.has(dot.dataset.record));
    panel.replaceChildren(...nodeDetail(step, component, byId.get(id)));
  }
  function press(event, id) {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(id); }
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const calls = [...place.querySelectorAll("[data-node]")];
    const next = calls[calls.findIndex((shape) => shape.dataset.node === id) + move];
    if (next) next.focus();
  }
  return drawn(place, (available) => {
    const focused = place.contains(document.activeElement) ? document.activeElement.dataset.node : null;
    const records = component.sources.length, boxes = Math.max(...levels.map((l) => l.length));
    const width = Math.max(available, boxes * 30 + 16, records * 5 + 16), rowHeight = 66;
    const at = new Map(), slot = (i, count) => 8 + ((i + 0.5) * (width - 16)) / count;
    levels.forEach((level, row) => level.forEach((id, i) => at.set(id, [slot(i, level.length), 22 + row * rowHeight])));
    const recordY = 46 + levels.length * rowHeight;
    for (let i = 0; i < records; i++) at.set(`r${i}`, [slot(i, records), recordY]);
    const edges = svg("g", {}), picture = svg("svg", { width, height: recordY + (records ? 14 : -70) }, edges);
    for (const node of component.nodes) for (const input of node.inputs) {
      if (!at.has(input)) continue;
      const [x1, y1] = at.get(node.id), [x2, y2] = at.get(input), middle = (y1 + y2) / 2;
      edges.append(svg("path", { class: "edge", "data-to": node.id, d: `M${x1} ${y1}C${x1} ${middle} ${x2} ${middle} ${x2} ${y2}` }));
    }
    for (let i = 0; i < records; i++) {
      const source = component.sources[i], scores = [step.scores_before[source], step.scores_after[source]].map((s) => figure(s)).join(" to ");
      picture.append(svg("circle", { class: lost.has(i) ? "record lost" : "record", "data-record": `r${i}`, cx: at.get(`r${i}`)[0], cy: recordY, r: Math.min(4, Math.max(2, (width - 16) / records / 2 - 0.7)) },
        svg("title", {}, `r${i}: example ${exampleOf(step, component, i)}, score ${scores}${lost.has(i) ? ", lost" : ""}`)));
    }
    for (const level of levels) for (const id of level) {
      const [x, y] = at.get(id), node = byId.get(id), half = Math.min(22, (width - 16) / boxes / 2 - 2);
      picture.append(svg("g", { class: kind(node), "data-node": id, role: "button", tabindex: 0, "aria-pressed": "false", "aria-controls": panel.id,
        "aria-label": facts(node), onclick: () => choose(id), onkeydown: (event) => press(event, id) },
      svg("title", {}, facts(node)), svg("rect", { x: x - half, y: y - 13, width: 2 * half, height: 26, rx: 7 }), svg("text", { x, y: y + 4 }, id)));
    }
    place.replaceChildren(picture);
    if (chosen !== null) choose(chosen);
    if (focused) place.querySelector(`[data-node="${CSS.escape(focused)}"]`).focus();
  });
}
function nodeDetail(step, component, node) {
  const u = node.usage;
  const reads = node.inputs.map((id) => (/^r\d+$/.test(id) ? `${id} (example ${exampleOf(step, component, Number(id.slice(1)))})` : id));
  return [el("h4", {}, `Call ${node.id}`),
    el("p", { class: "soft small" }, `${time(node.seconds)}, ${many(u.calls, "LM call")}${u.cache_hits ? ` (${u.cache_hits} from the cache)` : ""}, ${figure(u.input_tokens)} tokens in, ${figure(u.output_tokens)} out, cost ${u.cost === null ? "unknown" : dollars(u.cost)}`),
    node.error && el("p", { class: "error" }, `Error: ${node.error}`),
    node.output === null ? el("p", { class: "soft" }, "It gave no proposal.") : el("pre", { tabindex: 0, "aria-label": `Output of call ${node.id}` }, node.output),
    node.reply && fold("The reply as it came", () => [el("pre", { tabindex: 0 }, node.reply)]),
    fold(`What it read: ${many(reads.length, "input")}`, () => [el("p", { class: "small" }, reads.join(", "))]),
    node.prompt && fold("Its prompt", () => [el("pre", { tabindex: 0 }, node.prompt),
      node.prompt_left_out > 0 && el("p", { class: "soft small" }, `${many(node.prompt_left_out, "more character")} in the step record.`)])]
    .filter(Boolean);
}
function fold(title, make) {
  const box = el("details", { ontoggle: () => { if (box.open && box.childNodes.length === 1) fill(box, {}, make()); } }, el("summary", {}, title));
  return box;
}
function changes(component) {
  if (component.text === null) return null;
  if (component.diff === null) return [el("h4", {}, "The proposal"), el("pre", { tabindex: 0 }, component.text)];
  if (component.diff.length === 0) return el("p", { class: "soft" }, "The proposal is the parent's instruction, word for word.");
  const kinds = { "+": "added", "-": "removed", " ": null, skip: "skip" };
  const words = { "+": "added", "-": "removed" };
  return [el("h4", {}, "From the parent's instruction to the proposal"),
    el("div", { class: "diff mono", role: "region", tabindex: 0, "aria-label": `What changed in ${component.name}` }, component.diff.map(([sign, parts]) => el("div", { class: kinds[sign] },
      el("span", words[sign] ? { role: "img", "aria-label": words[sign] } : {}, sign === "skip" ? "" : sign),
      el("span", {}, sign === "skip" ? `${parts[0][1]} unchanged lines` : parts.map(([changed, text]) => (changed ? el(sign === "+" ? "ins" : "del", {}, text) : text)))))),
    fold("The whole proposal", () => [el("pre", { tabindex: 0 }, component.text)])];
}
function reflections(step) {
  const unused = step.reflections.filter((r) => r.unused);
  return fold(`${many(step.reflections.length, "reflection")}, ${figure(unused.length)} of them fed no delta that survived`, () =>
    step.reflections.map((r) => el("div", { class: "card" },
      el("p", {}, el("span", { class: "mono" }, r.id), ` example ${step.examples[r.source] ?? "?"} `, r.unused && el("span", { class: "badge" }, "unused")),
      r.error && el("p", { class: "soft" }, r.error), r.text && el("pre", {}, r.text))));
}

// Playbooks ---------------------------------------------------------------------------------------------------

function playbook(book) {
  const line = (key) => book.sizes.map((s) => [s.iteration, s[key]]);
  const rows = book.sizes.map((s) => el("tr", {}, el("td", { class: "wide" }, `Step ${s.iteration}`),
    cell("bullets", figure(s.bullets), "number"), cell("tokens", figure(s.tokens), "number"),
    cell("helpful", figure(s.helpful), "number"), cell("harmful", figure(s.harmful), "number"), cell("neutral", figure(s.neutral), "number"),
    cell("conflicts", figure(s.conflicts), "number"), cell("refused", figure(s.refused), "number"), cell("pruned", figure(s.pruned), "number"),
    el("td", { class: "wide soft" }, Object.entries(s.operations).map(([name, count]) => `${count} ${name}`).join(", "))));
  const heads = [["Step"], ["Bullets", "number"], ["Tokens", "number"], ["Helpful", "number"], ["Harmful", "number"], ["Neutral", "number"],
    ["Conflicts", "number"], ["Refused", "number"], ["Pruned", "number"], ["Deltas that took effect"]];
  const bullets = [...book.bullets].sort((a, b) => (a.gone !== null) - (b.gone !== null));
  return section(`Playbook of ${book.component}`,
    chart({ whole: true, x: "step", y: "bullets", label: `Bullets over the steps, ${figure(book.sizes[book.sizes.length - 1].bullets)} at the end`,
      lines: [{ kind: "series", points: line("bullets") }], dots: line("bullets").map(([i, n]) => [i, n, "median", `step ${i}: ${many(n, "bullet")}`]) }),
    table(`Playbook of ${book.component} by step`, heads, rows, "cards"),
    fold(`${many(bullets.length, "bullet")} with their counters over time`, () => [
      el("p", { class: "soft small" }, "Replayed from these steps: what a bullet had before them is not counted."),
      bullets.map(bulletCard)]));
}
function bulletCard(bullet) {
  const last = bullet.counters.length ? bullet.counters[bullet.counters.length - 1] : [0, 0, 0];
  const life = [bullet.made === null ? "" : `added in step ${bullet.made}`, bullet.gone === null ? "" : `${bullet.why} in step ${bullet.gone}`].filter(Boolean).join(", ");
  return el("div", { class: bullet.gone === null ? "card" : "card gone" },
    el("p", {}, el("span", { class: "mono" }, bullet.id), " ", el("span", { class: "badge good" }, `helpful ${last[1]}`), " ",
      el("span", { class: "badge bad" }, `harmful ${last[2]}`), " ", el("span", { class: "soft small" }, [bullet.section, life].filter(Boolean).join("; "))),
    el("p", {}, bullet.content || "Its text is not part of these steps."),
    bullet.counters.length > 0 && el("p", { class: "soft small" }, "Helpful and harmful by step: ",
      bullet.counters.map(([i, good, bad]) => `step ${i}: ${good} / ${bad}`).join(", ")));
}

// The page ----------------------------------------------------------------------------------------------------

const main = document.getElementById("report");
if (data.steps.length === 0) {
  fill(main, {}, [section("No steps", el("p", {}, "This run has made no step yet."))]);
} else {
  fill(main, {}, [totals(), scores(), el("div", { class: "pair charts" }, delay(), phases()), data.playbooks.map(playbook), steps()]);
}
