// The ladder: one picture of a plan, drawn from the data of splitkit/view/ladder.py. No dependencies, no network.
// Text from models goes through textContent and fillText only.
const KINDS = {F: "forward", B: "backward", I: "backward (input)", W: "backward (weight)"};
const ROW = 26, GAP = 10, BOX = 220, RIBBONS = 190, LEFT = 170, OP = 19, OPW = 178;

function scaled(value, base, units) {
  let power = 0;
  while (Math.abs(value) >= base * 0.9995 && power < units.length - 1) { value /= base; power++; }
  const whole = power === 0 && Number.isInteger(value);
  return `${fixed(value, whole || Math.abs(value) >= 100 ? 0 : 2)} ${units[power]}`.trimEnd();
}
/** As Python rounds: to the even digit where both are as near, which toFixed does not. */
function fixed(value, digits) {
  const long = value.toFixed(99), at = long.indexOf(".") + digits + (digits ? 1 : 0), low = long.slice(0, at);
  return /^\.?50*$/.test(long.slice(at)) && "02468".includes(low.at(-1)) ? low : value.toFixed(digits);
}
const size = b => !(b >= 0) ? "–" : scaled(b, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
function duration(s, unit) {
  if (unit !== "s") return `${scaled(s, 1000, ["", "k", "M", "G", "T", "P"])} ${unit}`;
  for (const [scale, name] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"], [1e-12, "ps"]])
    if (Math.abs(s) >= scale * 0.9995) {
      const [number, of] = [s / scale, Math.abs(s / scale)];
      return `${Number(fixed(number, of < 9.995 ? 2 : of < 99.95 ? 1 : 0))} ${name}`;
    }
  return s ? `${Number((s / 1e-12).toPrecision(2))} ps` : "0 us";
}

/** What stages cost that are stretches of rows: the numbers of Python, looked up. Bytes are known between marks, and of each row. */
class Prices {
  constructor(data) { Object.assign(this, {data, place: new Map(data.marks.map((row, i) => [row, i])), count: data.marks.length - 1}); }
  has(row) { return this.place.has(row); }
  of(start, end) {
    const {data} = this, [a, b] = [start, end].map(row => this.place.get(row)), known = a >= 0 && b >= 0;
    const [from, at] = known ? [data.stretches, a * this.count - a * (a - 1) / 2 + b - a - 1] : end === start + 1 ? [data.alone, start] : [null];
    const [saved, temporary, fixed] = ["saved", "temporary", "fixed"].map(c => from ? from[c][at] : NaN);
    return this.whole(...["forward", "backward"].map(c => sum(data.times[c].slice(start, end))), saved, temporary, fixed);
  }
  at(s, k) { return this.whole(...["forward", "backward", "saved", "temporary", "fixed"].map(c => s[c][k])); }
  whole(forward, backward, saved, temporary, fixed) { return {forward, backward, saved, temporary, fixed, seconds: forward + backward, peak: fixed + saved + temporary}; }
  /** Those of the plan as it came are what Python says of it; others are looked up. */
  stages(borders, shipped) {
    const own = (k, end) => shipped ? this.at(this.data.stages, k) : this.of(borders[k], end);
    return borders.slice(1).map((end, k) => ({...own(k, end), start: borders[k], end, down: this.data.down[end], up: this.data.up[borders[k]]}));
  }
  /** Borders of so many stages with the least longest one; of equal ones the most even (dynamic programming). */
  even(count) {
    const n = this.count, {marks, times} = this.data, best = [Array(n + 1).fill(null)], past = [0];
    times.forward.forEach((seconds, row) => past.push(past[row] + seconds + times.backward[row]));
    best[0][0] = [0, 0, -1];
    for (let k = 1; k <= count; k++) {
      best.push(Array(n + 1).fill(null));
      for (let end = k; end <= n; end++) for (let start = k - 1; start < end; start++) {
        const before = best[k - 1][start];
        if (!before) continue;
        const own = past[marks[end]] - past[marks[start]], most = Math.max(before[0], own), squares = before[1] + own * own, now = best[k][end];
        if (!now || most < now[0] * (1 - 1e-9) || (most <= now[0] * (1 + 1e-9) && squares < now[1])) best[k][end] = [most, squares, start];
      }
    }
    const ends = [n];
    for (let k = count; k > 0; k--) ends.unshift(best[k][ends[0]][2]);
    return ends.map(end => marks[end]);
  }
}

/** What each rank runs in turn, [rank, kind, stage, microbatch]; null where the schedule does not go with so many stages. */
function orderOf(run, count) {
  if (count === run.stages) return run.events;
  const {standard} = run.again, m = run.microbatches, found = [];
  if (!standard || (standard === "1F1B" && m < count)) return null;
  for (let rank = 0; rank < count; rank++) {
    const ahead = standard === "GPipe" ? m : count - 1 - rank;
    for (let i = 0; i < ahead; i++) found.push([rank, "F", rank, i]);
    for (let i = 0; i < m; i++) { if (i + ahead < m) found.push([rank, "F", rank, i + ahead]); found.push([rank, "B", rank, i]); }
  }
  return found;
}
/** The run of other stages, as splitkit.pipeline.simulate and memory say it; null where Python does not say how. */
function simulated(run, stages, place) {
  const order = run && run.again && stages.every(s => s.peak >= 0) && orderOf(run, stages.length);
  if (!order) return null;
  const {overlap, trips, down, up} = run.again, ranks = Math.max(...order.map(e => e[0])) + 1, rankOf = [], lists = Array.from({length: ranks}, () => []);
  const at = Array(ranks).fill(0), free = Array(ranks).fill(0), idle = {}, done = new Map(), name = (kind, stage, m) => `${kind}${stage} ${m}`;
  order.forEach(([rank, kind, stage, m], i) => { rankOf[stage] = rank; lists[rank].push({rank, kind, stage, m, i}); });
  const remote = (a, b) => b >= 0 && b < stages.length && rankOf[a] !== rankOf[b];
  const takes = (table, k, row) => trips[table[k] ?? table[0]][place.get(row)];
  const ready = a => {
    const forward = a.kind === "F", from = a.stage + (forward ? -1 : 1), to = a.stage - (forward ? -1 : 1), edge = from < 0 || from >= stages.length, own = stages[a.stage];
    a.need = edge ? null : done.get(name(a.kind, from, a.m));
    if ((!edge && !a.need) || (!forward && !done.has(name("F", a.stage, a.m)))) return false;
    a.far = remote(a.stage, from);
    a.sends = remote(a.stage, to);
    a.trip = !a.sends ? 0 : forward ? takes(down, a.stage, own.end) : takes(up, a.stage - 1, own.start);
    const start = Math.max(free[a.rank], !a.need ? 0 : overlap ? a.need.arrival : a.need.departure) + (!overlap && a.far ? a.need.trip : 0), end = start + (forward ? own.forward : own.backward);
    Object.assign(a, {forward, start, end, departure: end, arrival: end + a.trip});
    if (overlap && a.sends) {
      const wire = `${a.rank} ${rankOf[to]}`;
      a.departure = Math.max(end, idle[wire] || 0);
      a.arrival = idle[wire] = a.departure + a.trip;
    }
    free[a.rank] = overlap ? end : a.arrival;
    done.set(name(a.kind, a.stage, a.m), a);
    return true;
  };
  for (let before = -1; before < done.size;) {
    before = done.size;
    lists.forEach((list, rank) => { while (at[rank] < list.length && ready(list[at[rank]])) at[rank]++; });
  }
  const all = lists.flat(), seconds = Math.max(...all.map(a => a.end)), busy = sum(all.map(a => a.end - a.start));
  return {...run, ranks, seconds, bubble: seconds ? 1 - busy / (seconds * ranks) : 0, events: all.map(a => [a.rank, a.kind, a.stage, a.m, a.start, a.end]),
    ...heldBy(lists, stages, run, remote)};
}
/** What each rank holds over time, and its peak: of what happens at one time the most, in the order of the actions. */
function heldBy(lists, stages, run, remote) {
  const still = run.again.static, changes = lists.map(() => []);
  const held = (rank, nbytes, start, first, stop, last) => { if (nbytes) changes[rank].push([start, first, nbytes], [stop, last, -nbytes]); };
  const fixed = lists.map(() => 0), came = k => stages[k - 1].down, back = k => stages[k].up;
  stages.forEach((stage, k) => {
    const {rank} = lists.find(list => list.some(a => a.stage === k))[0], m = run.microbatches;
    fixed[rank] += stage.fixed + (still && remote(k, k - 1) ? m * came(k) : 0) + (still && remote(k, k + 1) ? m * back(k + 1) : 0);
  });
  const began = new Map();
  for (const a of lists.flat()) {
    const own = stages[a.stage], first = 2 * a.i, last = first + 1;
    held(a.rank, own.temporary, a.start, first, a.end, last);
    if (a.forward) began.set(`${a.stage} ${a.m}`, a);
    else {
      const f = began.get(`${a.stage} ${a.m}`);
      held(a.rank, Math.max(0, own.saved - (still && remote(a.stage, a.stage - 1) ? came(a.stage) : 0)), f.start, 2 * f.i, a.end, last);
      if (a.need && !a.far) held(a.rank, back(a.need.stage), a.need.end, 2 * a.need.i + 1, a.end, last);
      if (a.arrival > a.end) held(a.rank, own.up, a.end, last, a.arrival, Infinity);
    }
    if (a.far && a.need && !still) held(a.rank, a.forward ? came(a.stage) : back(a.need.stage), a.need.departure, -1, ...(a.forward ? [a.start, first] : [a.end, last]));
  }
  const memory = changes.map((own, rank) => {
    let now = fixed[rank];
    const points = [[0, now]];
    own.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    for (let i = 0; i < own.length;) {
      const time = own[i][0], before = points[points.length - 1];
      let most = before[0] === time ? before[1] : 0;
      while (i < own.length && own[i][0] === time) {
        const {1: place} = own[i];
        while (i < own.length && own[i][0] === time && own[i][1] === place) now += own[i++][2];
        most = Math.max(most, now);
      }
      if (before[0] === time) points.pop();
      points.push([time, most], ...(most === now ? [] : [[time, now]]));
    }
    return points;
  });
  return {memory, peaks: memory.map(points => Math.max(...points.map(point => point[1])))};
}

/** The borders of the plan as it came. */
function bordersOf(data) {
  const found = [0];
  data.rows.forEach((row, i) => { if (i && row.part !== data.rows[i - 1].part) found.push(i); });
  return [...found, data.rows.length];
}

function el(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) name.startsWith("on") ? made.addEventListener(name.slice(2), value) : made.setAttribute(name, value);
  return made;
}

/** The columns of ops, unfolded. */
class Ops {
  constructor(told) {
    Object.assign(this, {told, count: told.name.length, name: told.name, row: told.row});
    this.reads = told.reads.map((steps, op) => steps.map(step => op - step));
  }
  op(i) { return this.told.sorts[this.told.sort[i]][0]; }
  value(i) { return this.told.sorts[this.told.sort[i]][1]; }
  bytes(i) { return this.told.sorts[this.told.sort[i]][2]; }
  seconds(i) { return this.told.sorts[this.told.sort[i]][3]; }
  module(i) { return this.told.modules[this.told.module[i]]; }
  /** Which of them have the text in their op, name, module or row. */
  find(text, rows) {
    const has = word => word.toLowerCase().includes(text), sorts = this.told.sorts.map(sort => has(sort[0])), modules = this.told.modules.map(has), named = rows.map(row => has(row.name));
    return [...this.name.keys()].filter(i => sorts[this.told.sort[i]] || modules[this.told.module[i]] || named[this.row[i]] || has(this.name[i]));
  }
}

class Ladder {
  constructor(host, data, options = {}) {
    Object.assign(this, {data, options, ops: new Ops(data.ops), open: new Set(), zoom: 1, x: 0, y: 0, untouched: true});
    this.selected = this.hovered = this.query = null;
    this.prepare();
    this.borders = [...this.shipped];
    this.folded = data.rows.length > 40;
    this.opsOf = data.rows.map(() => []);
    this.lateOf = data.rows.map(() => []);
    this.ops.row.forEach((row, op) => (op < this.late ? this.opsOf : this.lateOf)[row].push(op));
    this.build(host);
    this.layout();
    this.fit();
    this.showSide();
  }

  /** What the picture is of. */
  prepare() {
    const {data} = this;
    Object.assign(this, {prices: new Prices(data), shipped: bordersOf(data), trains: data.trains, late: this.ops.count, saved: data.saved, edges: data.edges});
  }
  // ---- the frame
  build(host) {
    const {data} = this, root = this.root = el("div", undefined, {class: `sk${this.options.dark ? " dark" : ""}`});
    if (this.options.height) root.style.setProperty("--h", `${this.options.height}px`);
    const head = el("header");
    this.count = el("b");
    this.slider = this.makeSlider();
    this.reset = el("button", "as planned", {onclick: () => this.asPlanned()});
    this.fold = el("button", "", {onclick: () => { this.folded = !this.folded; this.layout(); this.fit(); }});
    this.search = el("input", undefined, {type: "search", placeholder: "search op or module", "aria-label": "search op or module"});
    this.hits = el("span", "", {class: "mut", "aria-live": "polite"});
    this.search.addEventListener("input", () => this.find(this.search.value));
    this.search.addEventListener("keydown", e => { if (e.key === "Enter") this.nextHit(); });
    head.append(el("b", "splitkit"), el("span", `${data.title}${data.title ? " · " : ""}${this.ops.count} ops`, {class: "mut"}));
    const label = el("label", `${this.slider.getAttribute("aria-label")} `);
    label.append(this.slider, " ", this.count);
    head.append(label, this.reset, this.fold, el("button", "fit", {onclick: () => this.fit(0)}), this.search, this.hits,
      el("button", "◐", {title: "dark or light", "aria-label": "dark or light", onclick: () => { root.classList.toggle("dark"); this.draw(); }}));
    this.main = el("main");
    this.canvas = el("canvas", undefined, {tabindex: 0, role: "img", "aria-label": "forward, backward and the cuts of the plan; arrow keys select, Enter opens"});
    this.tip = el("div", "", {class: "tip"});
    this.main.append(this.canvas, this.tip);
    this.side = el("aside");
    root.append(head, this.main, this.side);
    this.timeline = this.makeTimeline(root);
    host.append(root);
    this.listen();
    this.observer = new ResizeObserver(() => this.untouched ? this.fit() : this.draw());
    this.observer.observe(this.main);
  }

  makeSlider() {
    const slider = el("input", undefined, {type: "range", min: 1, max: Math.min(this.data.marks.length - 1, Math.max(16, this.shipped.length - 1)), "aria-label": "stages"});
    slider.addEventListener("input", () => this.setCount(Number(slider.value)));
    return slider;
  }
  makeTimeline(root) { return this.data.run ? new Timeline(this, root) : null; }
  asPlanned() { this.setBorders(this.shipped); }

  // ---- what is shown: items are rows, or runs of equal rows of one stage that are folded
  stageOf(row) { let k = 0; while (this.borders[k + 1] <= row) k++; return k; }
  otherOf(row) { return this.data.beside ? this.data.beside.rows[row] : -1; }
  layout() {
    const {rows} = this.data, items = [];
    for (let row = 0; row < rows.length;) {
      let end = row + 1;
      if (this.folded && !this.open.has(row))
        while (end < rows.length && rows[end].kind === rows[row].kind && this.stageOf(end) === this.stageOf(row) && this.otherOf(end) === this.otherOf(row) && !this.open.has(end)) end++;
      items.push({start: row, end});
      row = end;
    }
    let y = 0;
    this.itemOf = [];
    for (const item of items) {
      item.y = y;
      const open = this.open.has(item.start);
      item.inner = open ? layered(this.opsOf[item.start], this.ops.reads) : null;
      item.mirror = open ? this.mirrored(item.start) : null;
      item.h = open ? Math.max(item.inner.height, item.mirror ? item.mirror.height : 0) + ROW + 8 : ROW;
      item.w = open ? Math.max(BOX, item.inner.width + 16) : BOX;
      item.w2 = item.mirror ? Math.max(BOX, item.mirror.width + 16) : BOX;
      for (let row = item.start; row < item.end; row++) this.itemOf[row] = item;
      y += item.h + GAP;
    }
    this.items = items;
    this.height = y - GAP;
    this.wide = Math.max(BOX, ...items.map(item => item.w));
    this.wide2 = Math.max(BOX, ...items.map(item => item.w2));
    this.right = LEFT + this.wide + (this.trains ? RIBBONS + this.wide2 : 0);
    this.fold.textContent = this.folded ? "unfold" : "fold equal layers";
    this.draw();
  }
  /** The ops of backward of a row, which read up; of a plan in stages it is not known op by op. */
  mirrored() { return null; }
  name(item) {
    const {rows} = this.data, count = item.end - item.start;
    return count === 1 ? rows[item.start].name : `${rows[item.start].name} … ${rows[item.end - 1].name.split(".").pop()}  ×${count}`;
  }
  setCount(count) {
    const own = this.shipped.length - 1 === count;
    if (this.options.oncount && this.options.oncount(count, own)) this.count.textContent = count; // Python plans, and its answer is drawn
    else this.setBorders(own ? this.shipped : this.prices.even(count), ", divided evenly here");
  }
  setBorders(borders, how = ", moved by hand") {
    Object.assign(this, {borders: [...borders], how});
    this.layout();
    this.showSide();
    if (this.options.onplan) this.options.onplan(this.borders);
  }
  /** The step of the plan as it is now; null where it is not known. */
  get run() {
    const {borders, data} = this;
    if (this.isShipped || !data.run) return data.run;
    if (this.ranFor !== borders) Object.assign(this, {ranFor: borders, ran: simulated(data.run, this.prices.stages(borders, false), this.prices.place)});
    return this.ran;
  }
  /** Whether cuts can be moved: what each stage would cost is known. */
  get movable() { return this.borders.every(row => this.prices.has(row)); }
  get isShipped() { return this.borders.join() === this.shipped.join(); }
  colour(stage) { return COLOURS[stage % COLOURS.length]; }
  partName(stage) { return this.isShipped ? this.data.parts[this.data.rows[this.borders[stage]].part] : String(stage); }

  // ---- the side: stages, and what is selected
  showSide() {
    const {data, side} = this, stages = this.prices.stages(this.borders, this.isShipped);
    this.slider.value = stages.length;
    this.count.textContent = stages.length;
    this.reset.disabled = this.isShipped;
    side.replaceChildren();
    this.table(stages, this.isShipped ? "" : this.how, (k, stage) => `${this.partName(k)}${this.isShipped && data.devices[k] ? ` ${data.devices[k]}` : ""}`, true);
    if (data.beside) this.tableBeside(data.beside);
    if (data.memory) side.append(el("p", `limit ${size(data.memory)} a device; peak of one microbatch`, {class: "mut"}));
    this.describe();
    if (data.note && this.isShipped) side.append(el("h3", "plan"), el("p", data.note, {class: "mut"}));
    side.append(el("h3", "help"), el("p", `Double-click a module to open it. ${stages.length === 1 ? "" : !this.movable ? "There are too many stages to move cuts." : data.marks.length <= data.rows.length ? `Drag a dashed cut to move it, to ${data.marks.length - 2} places.` : "Drag a dashed cut to move it."} Wheel zooms, dragging moves. Arrow keys select, Enter opens, Alt + arrows move a cut.`, {class: "mut"}));
  }
  table(stages, more, name, links) {
    const {data} = this, most = Math.max(...stages.map(s => s.seconds)), total = sum(stages.map(s => s.seconds));
    this.side.append(el("h3", `${stages.length} ${stages.length === 1 ? "stage" : "stages"}, balance ${(100 * total / (most * stages.length || 1)).toFixed(0)} %${more}`));
    const table = el("table"), head = el("tr"), body = el("tbody"), cuts = stages[0].down !== undefined;
    const titles = ["stage", "time", ...(this.trains ? ["saved"] : []), "peak", ...(cuts ? ["▼", ...(this.trains ? ["▲"] : [])] : [])];
    titles.forEach(title => head.append(el("th", title)));
    stages.forEach((stage, k) => {
      const row = el("tr", undefined, links ? {tabindex: 0, onclick: () => this.select({stage: k}), onkeydown: e => { if (e.key === "Enter") this.select({stage: k}); },
        onmouseenter: () => this.hover({stage: k}), onmouseleave: () => this.hover(null)} : {});
      const first = el("td"), dot = el("i");
      dot.style.background = this.colour(k);
      first.append(dot, name(k, stage));
      row.append(first, el("td", duration(stage.seconds, data.unit), stage.seconds === most && stages.length > 1 ? {class: "bad"} : {}));
      if (this.trains) row.append(el("td", size(stage.saved)));
      row.append(el("td", size(stage.peak), data.memory && stage.peak > data.memory ? {class: "bad"} : {}));
      if (cuts) row.append(el("td", stage.down ? size(stage.down) : "–"));
      if (cuts && this.trains) row.append(el("td", stage.up ? size(stage.up) : "–"));
      if (links && this.selected && this.selected.stage === k) row.classList.add("on");
      body.append(row);
    });
    table.append(el("thead"), body);
    table.firstChild.append(head);
    this.side.append(table);
  }
  tableBeside(beside) {
    const moved = this.data.rows.filter((row, i) => beside.rows[i] !== this.stageOf(i)).map(row => row.name);
    this.table(beside.parts.map((part, k) => this.prices.at(beside.stages, k)), ", beside", k => beside.parts[k], false);
    this.side.append(el("p", moved.length ? `in another stage there: ${moved.join(", ")}` : "every row is in the same stage there", {class: "mut"}));
    if (beside.note) this.side.append(el("p", beside.note, {class: "mut"}));
  }
  factsOfRow(row, price) { return [["weights, state", size(price.fixed)], ["stage", this.partName(this.stageOf(row))]]; }
  factsOf(op) { return [["stage", this.partName(this.stageOf(this.ops.row[op]))]]; }
  describe() {
    const at = this.selected, {data} = this;
    if (!at) return;
    const list = el("dl"), facts = [];
    if (at.op !== undefined) {
      const {ops} = this, op = at.op;
      facts.push(["op", ops.op(op)], ["node", ops.name[op]], ["module", ops.module(op) || "(top level)"],
        ["value", ops.value(op)], ["bytes", size(ops.bytes(op))], ["time", duration(ops.seconds(op), data.unit)], ...this.factsOf(op));
    } else if (at.row !== undefined) {
      const item = this.itemOf[at.row], price = this.prices.of(item.start, item.end);
      facts.push(["module", this.name(item)], ["ops", String(sum(data.rows.slice(item.start, item.end).map(r => r.ops)))], ["forward", duration(price.forward, data.unit)]);
      if (this.trains) facts.push(["backward", duration(price.backward, data.unit)], ["saved", size(price.saved)]);
      facts.push(...this.factsOfRow(at.row, price));
    } else {
      const stage = this.prices.stages(this.borders, this.isShipped)[at.stage];
      facts.push(["stage", this.partName(at.stage)], ["forward", duration(stage.forward, data.unit)], ["backward", duration(stage.backward, data.unit)],
        ["weights, state", size(stage.fixed)], ["saved", size(stage.saved)], ["temporary", size(stage.temporary)]);
    }
    facts.forEach(([name, value]) => list.append(el("dt", name), el("dd", value)));
    this.side.append(el("h3", "selected"), list);
  }
  select(at, reveal = false) {
    this.selected = at;
    if (at && at.op !== undefined && !this.open.has(this.ops.row[at.op])) { this.open.add(this.ops.row[at.op]); this.layout(); }
    if (reveal) this.centre(at);
    this.showSide();
    this.draw();
    if (this.options.onselect) this.options.onselect(at);
  }
  hover(at) {
    if (JSON.stringify(at) === JSON.stringify(this.hovered)) return;
    this.hovered = at;
    this.draw();
  }
  toggle(row) {
    const item = this.itemOf[row];
    if (this.open.has(item.start)) this.open.delete(item.start);
    else this.open.add(item.start);
    const before = item.y;
    this.layout();
    this.y += (before - this.itemOf[row].y) * this.zoom;
    this.draw();
  }

  // ---- search
  find(text) {
    const wanted = text.trim().toLowerCase();
    this.query = wanted ? this.ops.find(wanted, this.data.rows) : null;
    this.at = -1;
    this.found = this.query && new Set(this.query.map(i => this.ops.row[i]));
    this.hits.textContent = this.query ? `${this.query.length} found` : "";
    this.draw();
  }
  nextHit() {
    if (!this.query || !this.query.length) return;
    this.at = (this.at + 1) % this.query.length;
    this.select({op: this.query[this.at]}, true);
  }
  centre(at) {
    const item = at.stage !== undefined ? this.itemOf[this.borders[at.stage]] : this.itemOf[at.op !== undefined ? this.ops.row[at.op] : at.row];
    const here = at.op !== undefined && this.innerOf(item).find(([, , inner]) => inner.boxes.has(at.op)), box = here ? here[2].boxes.get(at.op) : {x: 0, y: 0};
    this.zoom = Math.max(this.zoom, 0.8);
    this.x = this.main.clientWidth / 2 - ((here ? here[0] : LEFT) + box.x + OPW / 2) * this.zoom;
    this.y = this.main.clientHeight / 2 - (item.y + box.y + ROW) * this.zoom;
  }
  /** [left, top, inner graph] of an open item: forward's, and backward's if it is known. */
  innerOf(item) {
    const top = item.y + ROW, found = item.inner ? [[LEFT + (this.wide - item.inner.width) / 2, top, item.inner]] : [];
    return item.mirror ? [...found, [this.right - this.wide2 + (item.w2 - item.mirror.width) / 2, top, item.mirror]] : found;
  }
  /** All that can be read: a tall ladder from its top, unless it is asked for as a whole. */
  fit(least = 0.45) {
    const w = this.main.clientWidth, h = this.main.clientHeight;
    if (!w) return;
    const left = this.data.beside ? 50 : 12;
    this.zoom = Math.max(0.05, Math.min((w - left) / (this.right + 200), Math.max(h / (this.height + 70), least), 1.5));
    this.x = Math.max(left, (w - (this.right + 200) * this.zoom) / 2);
    this.y = 40 * this.zoom + Math.max(0, (h - (this.height + 60) * this.zoom) / 2);
    this.draw();
  }

  // ---- drawing
  draw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => { this.pending = 0; this.paint(); if (this.timeline) this.timeline.paint(); });
  }
  colourOf(name) { return getComputedStyle(this.root).getPropertyValue(name).trim(); }
  paint() {
    const [c, w, h] = context(this.canvas);
    this.ink = {fg: this.colourOf("--fg"), mut: this.colourOf("--mut"), bg: this.colourOf("--bg"), bad: this.colourOf("--bad"), rib: this.colourOf("--rib")};
    c.clearRect(0, 0, w, h);
    c.save();
    c.translate(this.x, this.y);
    c.scale(this.zoom, this.zoom);
    this.seen = {top: -this.y / this.zoom, bottom: (h - this.y) / this.zoom};
    this.bands(c);
    if (this.trains) this.ribbons(c);
    this.skips(c);
    if (this.data.beside) this.besides(c);
    for (const item of this.items) if (item.y + item.h > this.seen.top && item.y < this.seen.bottom) this.box(c, item);
    this.cuts(c);
    c.restore();
  }
  bands(c) {
    const stages = this.prices.stages(this.borders, this.isShipped);
    stages.forEach((stage, k) => {
      const top = this.itemOf[stage.start].y - GAP / 2, last = this.itemOf[stage.end - 1], bottom = last.y + last.h + GAP / 2, colour = this.colour(k);
      const on = [this.selected, this.hovered].some(at => at && at.stage === k);
      c.globalAlpha = on ? 0.28 : 0.12;
      c.fillStyle = colour;
      c.fillRect(0, top, this.right + 20, bottom - top);
      c.globalAlpha = 1;
      c.fillRect(0, top, 5, bottom - top);
      const lines = [[`stage ${this.partName(k)}`, "600 13px system-ui", this.ink.fg], [duration(stage.seconds, this.data.unit), "11px system-ui", this.ink.mut], [`peak ${size(stage.peak)}`, "11px system-ui", this.data.memory && stage.peak > this.data.memory ? this.ink.bad : this.ink.mut]];
      lines.slice(0, Math.max(1, Math.floor((bottom - top) / 15))).forEach(([text, font, ink], i) => put(c, text, 12, top + 14 + 15 * i, font, ink));
    });
    put(c, "forward ↓", LEFT + this.wide / 2, -14, "600 12px system-ui", this.ink.mut, "center");
    if (!this.trains) return;
    put(c, "saved for backward", LEFT + this.wide + RIBBONS / 2, -14, "600 12px system-ui", this.ink.mut, "center");
    put(c, "backward ↑", this.right - this.wide2 + BOX / 2, -14, "600 12px system-ui", this.ink.mut, "center");
  }
  /** On the left the stages of the plan beside, and a mark where a row is in another stage there. */
  besides(c) {
    put(c, "beside", -17, -14, "600 12px system-ui", this.ink.mut, "center");
    this.items.forEach((item, i) => {
      const other = this.otherOf(item.start), colour = this.colour(other), first = !i || this.otherOf(this.items[i - 1].start) !== other;
      c.fillStyle = colour;
      c.fillRect(-28, item.y - GAP / 2 + (first ? 2 : -1), 22, item.h + GAP + (first ? -2 : 1));
      if (first) put(c, String(other), -17, item.y + 14, "600 12px system-ui", legible(colour), "center");
      if (other !== this.stageOf(item.start)) put(c, "moved", LEFT - 8, item.y + ROW / 2 + 4, "600 10px system-ui", this.ink.bad, "right");
    });
  }
  /** The colour of a box; of its half in backward if it is late. */
  paintOf(row) { return this.colour(this.stageOf(row)); }
  box(c, item) {
    const price = this.prices.of(item.start, item.end), x = LEFT + (this.wide - item.w) / 2, colour = this.paintOf(item.start, false);
    const faint = this.found && ![...Array(item.end - item.start).keys()].some(i => this.found.has(item.start + i));
    const marked = at => at && at.row !== undefined && this.itemOf[at.row] === item;
    const line = marked(this.selected) ? this.ink.fg : marked(this.hovered) ? this.ink.mut : null;
    c.globalAlpha = faint ? 0.25 : 1;
    this.rect(c, x, item.y, item.w, item.h, item.inner ? this.ink.bg : colour, line || colour);
    this.label(c, item.inner ? "▾ " : "▸ ", this.name(item), duration(price.forward, this.data.unit), x, item.y, item.w, item.inner ? this.ink.fg : legible(colour));
    if (this.trains) {
      const left = this.right - this.wide2, late = this.paintOf(item.start, true);
      this.rect(c, left, item.y, item.w2, item.mirror ? item.h : ROW, item.mirror ? this.ink.bg : late, line || late);
      if (!item.mirror) this.hatch(c, item, left);
      this.label(c, "∇ ", this.name(item), duration(price.backward, this.data.unit), left, item.y, item.w2, item.mirror ? this.ink.fg : legible(late));
    }
    for (const [left, top, inner] of this.innerOf(item)) this.inner(c, inner, left, top, item.start);
    c.globalAlpha = 1;
  }
  hatch() {}
  inner(c, inner, left, top, row) {
    const {ops} = this, hits = this.query && new Set(this.query);
    c.strokeStyle = this.ink.rib;
    c.lineWidth = 1;
    c.beginPath();
    for (const [op, box] of inner.boxes) for (const read of ops.reads[op]) {
      const from = inner.boxes.get(read), down = inner.up ? 0 : OP;
      if (from) { c.moveTo(left + from.x + OPW / 2, top + from.y + down); c.lineTo(left + box.x + OPW / 2, top + box.y + OP - down); }
    }
    c.stroke();
    for (const [op, box] of inner.boxes) {
      const on = this.selected && this.selected.op === op, colour = this.paintOf(row, inner.up && op >= this.late);
      c.globalAlpha = hits && !hits.has(op) ? 0.25 : 1;
      this.rect(c, left + box.x, top + box.y, OPW, OP, colour, on ? this.ink.fg : colour);
      if (inner.up && op < this.late) stripes(c, left + box.x, top + box.y, OPW, OP);
      this.label(c, "", ops.op(op).replace(/^aten\.(\w+)\.\w+$/, "$1"), ops.value(op).replace(/^\w+\[(.*)\]$/, (_, dims) => dims.replace(/, /g, "×")), left + box.x, top + box.y, OPW, legible(colour), OP);
    }
  }
  rect(c, x, y, w, h, fill, line) {
    c.beginPath();
    c.roundRect(x, y, w, h, 5);
    c.fillStyle = fill;
    c.fill();
    c.lineWidth = line === this.ink.fg ? 3 : 1;
    c.strokeStyle = line;
    c.stroke();
  }
  /** Of what follows a sign, the path of a module, the end is told; else the start. */
  label(c, sign, text, right, x, y, w, ink, h = ROW) {
    if (h * this.zoom < 8) return;
    c.font = "11px system-ui";
    const room = w - 16 - c.measureText(sign).width, tail = c.measureText(right).width;
    const gives = tail < room * 0.6;
    put(c, sign + cut(c, text, room - (gives ? tail + 8 : 0), sign), x + 8, y + h / 2 + 4, c.font, ink);
    if (gives) put(c, right, x + w - 8, y + h / 2 + 4, c.font, ink, "right");
  }
  /** Arrows from a row to the next, and bows for values that skip rows: forward on the left, gradients on the right. */
  skips(c) {
    const merged = merge(this.edges, this.itemOf);
    const most = Math.max(1, ...merged.map(e => e[2])), far = Math.max(...merged.map(e => e[1] - e[0]));
    for (const [from, to, nbytes] of merged) {
      const a = this.items[from], b = this.items[to], skip = to > from + 1;
      if (Math.max(a.y, b.y + b.h) < this.seen.top || Math.min(a.y, b.y) > this.seen.bottom) continue;
      c.strokeStyle = this.ink.rib;
      c.lineWidth = 1 + 3 * Math.sqrt(nbytes / most);
      c.globalAlpha = skip ? 0.55 : 1;
      c.beginPath();
      if (skip) this.bow(c, LEFT + (this.wide - a.w) / 2, a.y + ROW / 2, LEFT + (this.wide - b.w) / 2, b.y + ROW / 2, -1, (to - from) / far);
      else { c.moveTo(LEFT + this.wide / 2, a.y + a.h); c.lineTo(LEFT + this.wide / 2, b.y); }
      if (this.trains) {
        const left = this.right - this.wide2;
        if (skip) this.bow(c, left + a.w2, a.y + ROW / 2, left + b.w2, b.y + ROW / 2, 1, (to - from) / far);
        else { c.moveTo(left + BOX / 2, a.y + (a.mirror ? a.h : ROW)); c.lineTo(left + BOX / 2, b.y); }
      }
      c.stroke();
      c.globalAlpha = 1;
    }
  }
  bow(c, x, y, x2, y2, side, far) {
    const out = side * Math.max(side * x, side * x2) + side * (6 + 26 * far); // beyond the wider of the two boxes
    c.moveTo(x, y);
    c.bezierCurveTo(out, y, out, y2, x2, y2);
  }
  ribbons(c) {
    const merged = merge(this.saved, this.itemOf), most = Math.max(1, ...merged.map(e => e[2])), taken = [];
    const left = LEFT + this.wide, right = this.right - this.wide2;
    for (const [from, to, nbytes] of [...merged].sort((a, b) => a[2] - b[2])) {
      const a = this.items[from], b = this.items[to], y = a.y + ROW / 2, y2 = b.y + ROW / 2, wide = Math.max(1, 16 * nbytes / most);
      const crosses = this.stageOf(a.start) !== this.stageOf(b.start);
      c.strokeStyle = crosses ? this.ink.bad : this.ink.rib;
      c.globalAlpha = crosses ? 0.8 : 0.55;
      c.lineWidth = wide;
      c.beginPath();
      const start = left - (this.wide - a.w) / 2;
      c.moveTo(start, y);
      c.lineTo(left, y);
      c.bezierCurveTo(left + 70, y, right - 70, y2, right, y2);
      c.stroke();
      c.globalAlpha = 1;
    }
    for (const [from, to, nbytes] of [...merged].sort((a, b) => b[2] - a[2])) {
      const y = (this.items[from].y + this.items[to].y) / 2 + ROW / 2 - 3;
      if (nbytes < most / 50 || taken.some(t => Math.abs(t - y) < 14)) continue;
      taken.push(y);
      put(c, size(nbytes), (left + right) / 2, y, "600 10px system-ui", this.ink.fg, "center", this.ink.bg);
    }
  }
  cuts(c) {
    this.borders.slice(1, -1).forEach((row, k) => {
      const y = this.itemOf[row].y - GAP / 2;
      c.strokeStyle = this.ink.fg;
      c.lineWidth = this.hovered && this.hovered.cut === k + 1 ? 2.5 : 1.3;
      c.setLineDash([7, 5]);
      c.beginPath();
      c.moveTo(0, y);
      c.lineTo(this.right + 20, y);
      c.stroke();
      c.setLineDash([]);
      const text = `▼ ${size(this.data.down[row])}${this.trains ? `   ▲ ${size(this.data.up[row])}` : ""}`;
      put(c, text, this.right + 26, y + 4, "600 11px system-ui", this.ink.fg);
    });
  }

  // ---- input
  at(event) { return [(event.offsetX - this.x) / this.zoom, (event.offsetY - this.y) / this.zoom]; }
  pick(event) {
    const [x, y] = this.at(event);
    const cutAt = !this.movable ? -1 : this.borders.findIndex((row, k) => k > 0 && k < this.borders.length - 1 && Math.abs(this.itemOf[row].y - GAP / 2 - y) * this.zoom < 6);
    if (cutAt > 0 && x > 0 && x < this.right + 20) return {cut: cutAt};
    const item = this.items.find(i => y >= i.y && y <= i.y + i.h);
    if (!item || x < 0 || x > this.right + 20) return null;
    for (const [left, top, inner] of this.innerOf(item)) for (const [op, box] of inner.boxes)
      if (x >= left + box.x && x <= left + box.x + OPW && y >= top + box.y && y <= top + box.y + OP) return {op};
    const left = LEFT + (this.wide - item.w) / 2, right = this.right - this.wide2;
    const inside = (x >= left && x <= left + item.w) || (this.trains && x >= right && x <= right + item.w2);
    return inside ? {row: item.start} : {stage: this.stageOf(item.start)};
  }
  listen() {
    const {canvas} = this;
    let drag = null;
    canvas.addEventListener("wheel", e => {
      e.preventDefault();
      this.untouched = false;
      const next = Math.max(0.05, Math.min(4, this.zoom * Math.exp(-e.deltaY * 0.0015)));
      this.x = e.offsetX - (e.offsetX - this.x) * next / this.zoom;
      this.y = e.offsetY - (e.offsetY - this.y) * next / this.zoom;
      this.zoom = next;
      this.draw();
    }, {passive: false});
    canvas.addEventListener("pointerdown", e => {
      canvas.setPointerCapture(e.pointerId);
      this.untouched = false;
      const at = this.pick(e);
      drag = at && at.cut ? {cut: at.cut} : {x: e.clientX - this.x, y: e.clientY - this.y, moved: false};
    });
    canvas.addEventListener("pointermove", e => {
      if (drag && drag.cut) return this.moveCut(drag.cut, this.rowNear(this.at(e)[1]));
      if (drag) {
        const x = e.clientX - drag.x, y = e.clientY - drag.y;
        if (drag.moved || Math.hypot(x - this.x, y - this.y) > 3) Object.assign(this, {x, y}), drag.moved = true, this.draw();
        return;
      }
      const at = this.pick(e);
      canvas.style.cursor = at && at.cut ? "ns-resize" : at && at.stage === undefined ? "pointer" : "grab";
      this.hover(at);
      this.showTip(at, e);
    });
    canvas.addEventListener("pointerup", e => { if (drag && !drag.cut && !drag.moved) { const at = this.pick(e); this.select(at && at.cut ? null : at); } drag = null; });
    canvas.addEventListener("pointerleave", () => { this.tip.style.display = "none"; this.hover(null); });
    canvas.addEventListener("dblclick", e => { const at = this.pick(e); if (at && at.row !== undefined) this.toggle(at.row); });
    canvas.addEventListener("keydown", e => this.key(e));
  }
  key(e) {
    const row = this.selected && (this.selected.row ?? (this.selected.op !== undefined ? this.ops.row[this.selected.op] : this.borders[this.selected.stage]));
    const step = {ArrowDown: 1, ArrowUp: -1}[e.key];
    if (step && e.altKey && row !== null) {
      const stage = this.stageOf(row), k = stage + 1 < this.borders.length - 1 ? stage + 1 : stage;
      if (k > 0) this.moveCut(k, this.data.marks[this.prices.place.get(this.borders[k]) + step]);
    } else if (step) {
      const item = row === null ? -1 : this.items.indexOf(this.itemOf[row]);
      const next = this.items[Math.max(0, Math.min(this.items.length - 1, item + step))];
      this.select({row: next.start}, true);
    } else if (e.key === "Enter" && row !== null) this.toggle(row);
    else if (e.key === "Escape") this.select(null);
    else if (e.key === "+" || e.key === "-") { this.zoom *= e.key === "+" ? 1.2 : 1 / 1.2; this.draw(); }
    else return;
    e.preventDefault();
  }
  rowNear(y) {
    let best = this.data.marks[1];
    for (const row of this.data.marks.slice(1, -1)) if (this.itemOf[row].start === row && Math.abs(this.itemOf[row].y - y) < Math.abs(this.itemOf[best].y - y)) best = row;
    return best;
  }
  moveCut(k, row) {
    if (!this.prices.has(row) || row <= this.borders[k - 1] || row >= this.borders[k + 1] || row === this.borders[k]) return;
    this.setBorders(this.borders.map((b, i) => i === k ? row : b));
  }
  showTip(at, e) {
    let text = "";
    if (at && at.op !== undefined) {
      const {ops} = this, i = at.op;
      text = `${ops.name[i]}  (${ops.op(i)})\n${ops.value(i)}  ${duration(ops.seconds(i), this.data.unit)}`;
    } else if (at && at.row !== undefined) {
      const item = this.itemOf[at.row], price = this.prices.of(item.start, item.end);
      text = `${this.name(item)}\nforward ${duration(price.forward, this.data.unit)}${this.trains ? `, backward ${duration(price.backward, this.data.unit)}, saved ${size(price.saved)}` : ""}`;
    }
    this.tip.textContent = text;
    Object.assign(this.tip.style, {display: text ? "block" : "none", left: `${Math.min(e.offsetX + 14, this.main.clientWidth - 280)}px`, top: `${e.offsetY + 16}px`});
  }
  destroy() { this.observer.disconnect(); cancelAnimationFrame(this.pending); this.root.remove(); }
}

/** When each rank computes what, and what it holds. */
class Timeline {
  constructor(ladder, root) {
    this.ladder = ladder;
    this.canvas = el("canvas", undefined, {role: "img", "aria-label": "what each rank computes when, and its memory"});
    const foot = el("footer");
    foot.append(this.canvas);
    root.append(foot);
    this.canvas.addEventListener("pointermove", e => { const hit = this.pick(e); this.microbatch = hit ? hit[3] : null; ladder.hover(hit ? {stage: hit[2]} : null); ladder.draw(); });
    this.canvas.addEventListener("pointerleave", () => { this.microbatch = null; ladder.hover(null); ladder.draw(); });
    this.canvas.addEventListener("click", e => { const hit = this.pick(e); if (hit) ladder.select({stage: hit[2]}, true); });
  }
  get run() { return this.ladder.run; }
  /** As high as there are ranks. */
  grow() { if (this.run) this.ladder.root.style.setProperty("--t", `${Math.min(260, 46 + 40 * this.run.ranks)}px`); }
  x(seconds) { return 70 + (this.w - 160) * seconds / this.run.seconds; }
  y(rank) { return 24 + rank * this.high; }
  paint() {
    this.grow();
    const [c, w, h] = context(this.canvas), {ladder, run} = this;
    if (!run) { c.clearRect(0, 0, w, h); return put(c, `${ladder.data.run.name} is not simulated here for these stages; “as planned” shows the step of the plan as it came`, 70, h / 2, "12px system-ui", ladder.ink.mut); }
    Object.assign(this, {w, h, high: (h - 44) / run.ranks});
    c.clearRect(0, 0, w, h);
    put(c, `${run.name} of ${run.microbatches} microbatches: step ${duration(run.seconds, run.unit)}, bubble ${(100 * run.bubble).toFixed(1)} %${ladder.isShipped ? "" : ladder.how}`, 70, 15, "600 11px system-ui", ladder.ink.fg);
    const limit = near(ladder.data.memory, Math.max(...run.peaks)), most = Math.max(limit, ...run.peaks) || 1;
    for (const event of run.events) {
      const [rank, kind, stage, microbatch, start, end] = event, x = this.x(start), wide = Math.max(0.5, this.x(end) - x), y = this.y(rank);
      const faint = this.microbatch !== null && this.microbatch !== undefined && this.microbatch !== microbatch;
      c.globalAlpha = (faint ? 0.15 : 1) * (kind === "F" ? 0.55 : kind === "W" ? 0.75 : 1);
      c.fillStyle = ladder.colour(stage);
      c.fillRect(x, y, wide, this.high * 0.5);
      c.globalAlpha = 1;
      if (wide > 12) put(c, String(microbatch), x + wide / 2, y + this.high * 0.25 + 4, "10px system-ui", kind !== "F" ? legible(ladder.colour(stage)) : ladder.root.classList.contains("dark") ? "#fff" : "#10151c", "center");
    }
    for (let rank = 0; rank < run.ranks; rank++) {
      const base = this.y(rank) + this.high * 0.95, top = this.y(rank) + this.high * 0.55;
      put(c, `rank ${rank}`, 64, this.y(rank) + this.high * 0.25 + 4, "11px system-ui", ladder.ink.mut, "right");
      c.beginPath();
      c.moveTo(this.x(0), base);
      let now = run.memory[rank][0][1];
      for (const [seconds, nbytes] of run.memory[rank]) {
        c.lineTo(this.x(seconds), base - (base - top) * now / most);
        c.lineTo(this.x(seconds), base - (base - top) * nbytes / most);
        now = nbytes;
      }
      c.lineTo(this.x(run.seconds), base - (base - top) * now / most);
      c.lineTo(this.x(run.seconds), base);
      c.fillStyle = ladder.ink.rib;
      c.globalAlpha = 0.6;
      c.fill();
      c.globalAlpha = 1;
      if (limit) {
        c.strokeStyle = ladder.ink.bad;
        c.beginPath();
        const y = base - (base - top) * limit / most;
        c.moveTo(this.x(0), y);
        c.lineTo(this.x(run.seconds), y);
        c.stroke();
      }
      put(c, size(run.peaks[rank]), w - 6, base, "11px system-ui", ladder.data.memory && run.peaks[rank] > ladder.data.memory ? ladder.ink.bad : ladder.ink.mut, "right");
    }
    put(c, "0", this.x(0), h - 6, "10px system-ui", ladder.ink.mut);
    put(c, duration(run.seconds, run.unit), this.x(run.seconds), h - 6, "10px system-ui", ladder.ink.mut, "right");
  }
  pick(e) {
    return this.run && this.run.events.find(([rank, , , , start, end]) => e.offsetX >= this.x(start) && e.offsetX <= this.x(end) && e.offsetY >= this.y(rank) && e.offsetY <= this.y(rank) + this.high) || null;
  }
}

/** Forward and backward of a joint graph: what is saved, what is computed again, and the memory of each step. */
class Halves extends Ladder {
  prepare() {
    const {data, ops} = this, edges = new Map();
    data.rows.forEach(row => { row.part = 0; });
    for (let op = 0; op < data.late; op++) for (const read of ops.reads[op]) {
      const [a, b] = [ops.row[read], ops.row[op]];
      if (a !== b) edges.set(a * data.rows.length + b, (edges.get(a * data.rows.length + b) || new Set()).add(read));
    }
    Object.assign(this, {trains: true, late: data.late, shipped: [0, data.rows.length]});
    this.edges = [...edges].map(([key, values]) => [Math.floor(key / data.rows.length), key % data.rows.length, sum([...values].map(op => ops.bytes(op)))]);
    this.take(data.chosen);
  }
  take(number) {
    const choice = this.choice = this.data.choices[this.number = number], saved = this.data.rows.map(() => 0);
    this.saved = choice.saved;
    this.again = new Set(choice.again);
    for (const [from, , nbytes] of choice.saved) saved[from] += nbytes;
    const over = (column, a, b) => sum(column.slice(a, b));
    this.prices = {of: (a, b) => ({forward: over(choice.forward, a, b), backward: over(choice.backward, a, b), saved: over(saved, a, b)})};
  }
  setChoice(number) {
    this.take(number);
    this.layout();
    this.showSide();
    if (this.options.onchoice) this.options.onchoice(number);
  }
  asPlanned() { this.setChoice(this.data.chosen); }
  makeSlider() {
    const slider = el("input", undefined, {type: "range", min: 0, max: this.data.choices.length - 1, "aria-label": "memory", ...(this.data.choices.length === 1 ? {disabled: ""} : {})});
    slider.addEventListener("input", () => this.setChoice(Number(slider.value)));
    return slider;
  }
  makeTimeline(root) { return new Steps(this, root); }
  paintOf(row, late) { return COLOURS[late ? 1 : 0]; }
  /** Hatched as far as its time is spent on computing again. */
  hatch(c, item, left) {
    const again = this.choice.again.filter(op => this.itemOf[this.ops.row[op]] === item), share = sum(again.map(op => this.ops.seconds(op))) / (this.prices.of(item.start, item.end).backward || 1);
    if (again.length) stripes(c, left, item.y, Math.min(1, share) * item.w2, ROW);
  }
  mirrored(row) {
    const inner = layered([...this.opsOf[row].filter(op => this.again.has(op)), ...this.lateOf[row]], this.ops.reads);
    for (const box of inner.boxes.values()) box.y = inner.height - OP - box.y;
    return Object.assign(inner, {up: true});
  }
  bands(c) {
    for (const [x, w, text, late] of [[LEFT, this.wide, "forward ↓", false], [this.right - this.wide2, this.wide2, "backward ↑", true]]) {
      c.globalAlpha = 0.12;
      c.fillStyle = this.paintOf(0, late);
      c.fillRect(x - 12, -8, w + 24, this.height + 16);
      c.globalAlpha = 1;
      put(c, text, x + w / 2, -14, "600 12px system-ui", this.ink.mut, "center");
    }
    const x = LEFT + this.wide + RIBBONS / 2;
    put(c, `saved: ${size(this.choice.bytes)}`, x, -14, "600 12px system-ui", this.ink.mut, "center");
    c.strokeStyle = this.ink.fg;
    c.lineWidth = 1.3;
    c.setLineDash([7, 5]);
    c.beginPath();
    c.moveTo(x, -8);
    c.lineTo(x, this.height + 8);
    c.stroke();
    c.setLineDash([]);
  }
  cuts() {}
  showSide() {
    const {data, side} = this;
    this.slider.value = this.number;
    this.count.textContent = size(this.choice.peak);
    this.reset.disabled = this.number === data.chosen;
    const table = el("table"), head = el("tr"), body = el("tbody");
    ["plan", "saved", "peak", "computed again"].forEach(title => head.append(el("th", title)));
    data.choices.forEach((choice, i) => {
      const row = el("tr", undefined, {tabindex: 0, onclick: () => this.setChoice(i), onkeydown: e => { if (e.key === "Enter") this.setChoice(i); }});
      row.append(el("td", String(i)), el("td", size(choice.bytes)), el("td", size(choice.peak), data.memory && choice.peak > data.memory ? {class: "bad"} : {}), el("td", choice.again.length ? `${choice.again.length} ops, ${duration(choice.seconds, data.unit)}` : "–"));
      if (i === this.number) row.classList.add("on");
      body.append(row);
    });
    table.append(el("thead"), body);
    table.firstChild.append(head);
    side.replaceChildren(el("h3", `${data.choices.length === 1 ? "1 plan" : `${data.choices.length} plans`} of forward and backward`), table);
    if (data.memory) side.append(el("p", `limit ${size(data.memory)}`, {class: "mut"}));
    this.describe();
    if (this.choice.note) side.append(el("h3", "plan"), el("p", this.choice.note, {class: "mut"}));
    side.append(el("h3", "help"), el("p", "Hatched: computed again in backward. Double-click a module to open it, click on the memory below to see what runs there. Wheel zooms, dragging moves. Arrow keys select, Enter opens.", {class: "mut"}));
  }
  factsOf(op) { return [["runs in", op >= this.late ? "backward" : this.again.has(op) ? "forward, and again in backward" : "forward"]]; }
  factsOfRow(row) {
    const item = this.itemOf[row], again = this.choice.again.filter(op => this.itemOf[this.ops.row[op]] === item);
    return [["computed again", again.length ? `${again.length} ops, ${duration(sum(again.map(op => this.ops.seconds(op))), this.data.unit)}` : "nothing"]];
  }
  pick(event) {
    const found = super.pick(event);
    return found && found.stage !== undefined ? null : found;
  }
}

/** The bytes that are alive at each step of forward and backward. */
class Steps {
  constructor(ladder, root) {
    this.ladder = ladder;
    this.canvas = el("canvas", undefined, {role: "img", "aria-label": "memory at each step of forward and backward"});
    const foot = el("footer");
    root.style.setProperty("--t", "150px");
    foot.append(this.canvas);
    root.append(foot);
    this.canvas.addEventListener("pointermove", e => { this.hover = this.pick(e); ladder.draw(); });
    this.canvas.addEventListener("pointerleave", () => { this.hover = null; ladder.draw(); });
    this.canvas.addEventListener("click", e => { const step = this.pick(e), op = step === null ? -1 : this.ops[step]; if (op >= 0) ladder.select({op}, true); });
  }
  /** The runs of the choice, unfolded. */
  unfold() {
    const {memory} = this.ladder.choice;
    if (this.of === memory) return;
    this.of = memory;
    this.ops = [];
    for (let i = 0; i < memory.steps.length; i += 2) for (let k = 0; k < memory.steps[i + 1]; k++) this.ops.push(memory.steps[i] < 0 ? -1 : memory.steps[i] + k);
    let live = 0;
    this.bytes = memory.bytes.flatMap(change => typeof change === "string" ? Array(Number(change)).fill(live) : [live += change]);
  }
  x(step) { return 84 + (this.w - 100) * step / Math.max(1, this.bytes.length); }
  paint() {
    const [c, w, h] = context(this.canvas), {ladder} = this, {choice, ink} = ladder, {memory} = choice;
    this.unfold();
    Object.assign(this, {w, h});
    c.clearRect(0, 0, w, h);
    const peaks = ladder.data.choices.map(each => each.peak), limit = near(ladder.data.memory, Math.max(...peaks)), most = Math.max(limit, ...peaks) || 1, base = h - 20, y = nbytes => base - (base - 26) * nbytes / most;
    for (const [name, start, stop] of memory.calls) {
      c.globalAlpha = 0.12;
      c.fillStyle = ladder.paintOf(0, name === "backward");
      c.fillRect(this.x(start), 20, this.x(stop) - this.x(start), base - 20);
      c.globalAlpha = 1;
      put(c, name, (this.x(start) + this.x(stop)) / 2, h - 6, "11px system-ui", ink.mut, "center");
    }
    c.beginPath();
    c.moveTo(this.x(0), base);
    this.bytes.forEach((nbytes, step) => { c.lineTo(this.x(step), y(nbytes)); c.lineTo(this.x(step + 1), y(nbytes)); });
    c.lineTo(this.x(this.bytes.length), base);
    c.fillStyle = ink.rib;
    c.globalAlpha = 0.6;
    c.fill();
    c.globalAlpha = 1;
    put(c, "0", 78, base, "10px system-ui", ink.mut, "right");
    put(c, size(most), 78, 30, "10px system-ui", ink.mut, "right");
    if (limit) this.line(c, y(limit), ink.bad);
    const marks = ladder.selected && ladder.selected.op !== undefined ? [...this.ops.keys()].filter(step => this.ops[step] === ladder.selected.op) : [];
    for (const step of this.hover === null || this.hover === undefined ? marks : [...marks, this.hover]) { c.fillStyle = ink.fg; c.fillRect(this.x(step), 20, Math.max(1, this.x(step + 1) - this.x(step)), base - 20); }
    const at = this.x(memory.at + 0.5), side = at > w / 2 ? "right" : "left";
    c.fillStyle = ink.bad;
    c.fillRect(at - 2, y(choice.peak) - 2, 4, 4);
    const op = this.ops[memory.at], shown = this.hover === null || this.hover === undefined ? `peak ${size(choice.peak)}${op >= 0 ? ` at ${ladder.ops.name[op]}` : ""}` : `${size(this.bytes[this.hover])} at ${this.ops[this.hover] >= 0 ? ladder.ops.name[this.ops[this.hover]] : `step ${this.hover}`}`;
    put(c, shown, at + (side === "right" ? -6 : 6), 15, "600 11px system-ui", ink.fg, side);
  }
  line(c, y, ink) { c.strokeStyle = ink; c.beginPath(); c.moveTo(this.x(0), y); c.lineTo(this.x(this.bytes.length), y); c.stroke(); }
  pick(e) {
    const step = Math.floor((e.offsetX - 84) / (this.w - 100) * this.bytes.length);
    return step >= 0 && step < this.bytes.length ? step : null;
  }
}

/** The picture of what the data is of. */
function show(host, data, options) { return new (data.choices ? Halves : Ladder)(host, data, options); }

/** What can be read on a colour. */
function legible(colour) {
  const [r, g, b] = [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#10151c" : "#fff";
}
/** Hatching, for what is computed again. */
function stripes(c, x, y, w, h) {
  c.save();
  c.beginPath();
  c.rect(x, y, w, h);
  c.clip();
  c.strokeStyle = "#ffffff55";
  c.lineWidth = 2;
  c.beginPath();
  for (let at = x - h; at < x + w; at += 7) { c.moveTo(at, y + h); c.lineTo(at + h, y); }
  c.stroke();
  c.restore();
}
/** A limit, if it is near enough to be drawn without making all else flat; else 0. */
const near = (limit, most) => limit && limit <= 3 * most ? limit : 0;
const sum = numbers => numbers.reduce((a, b) => a + b, 0);
/** [from row, to row, bytes] as [from item, to item, bytes], summed. */
function merge(triples, itemOf) {
  const items = [...new Set(itemOf)], place = new Map(items.map((item, i) => [item, i])), found = new Map();
  for (const [from, to, nbytes] of triples) {
    const a = place.get(itemOf[from]), b = place.get(itemOf[to]), key = a * items.length + b;
    found.set(key, (found.get(key) || 0) + nbytes);
  }
  return [...found].map(([key, nbytes]) => [Math.floor(key / items.length), key % items.length, nbytes]).filter(([a, b]) => a <= b);
}
/** Ops in layers: as far down as their longest path from above, then down to just above the first that reads them. */
function layered(ops, reads) {
  const own = new Set(ops), depth = new Map(), first = new Map(), boxes = new Map(), used = [];
  for (const op of ops) depth.set(op, 1 + Math.max(-1, ...reads[op].filter(r => own.has(r)).map(r => depth.get(r))));
  for (const op of [...ops].reverse()) {
    if (first.has(op)) depth.set(op, first.get(op) - 1);
    for (const read of reads[op]) first.set(read, Math.min(first.get(read) ?? Infinity, depth.get(op)));
  }
  for (const op of ops) {
    const layer = depth.get(op), column = used[layer] || 0;
    used[layer] = column + 1;
    boxes.set(op, {x: column * (OPW + 10), y: layer * (OP + 9)});
  }
  const wide = Math.max(...used, 1);
  for (const box of boxes.values()) box.x += (wide - used[box.y / (OP + 9)]) * (OPW + 10) / 2;
  return {boxes, width: wide * (OPW + 10) - 10, height: used.length * (OP + 9)};
}
function context(canvas) {
  const box = canvas.getBoundingClientRect(), ratio = window.devicePixelRatio || 1, c = canvas.getContext("2d");
  const w = Math.round(box.width * ratio), h = Math.round(box.height * ratio);
  if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, {width: w, height: h});
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  return [c, box.width, box.height];
}
function put(c, text, x, y, font, ink, align = "left", back = "") {
  c.font = font;
  c.textAlign = align;
  if (back) {
    const w = c.measureText(text).width, left = align === "right" ? x - w : align === "center" ? x - w / 2 : x;
    c.globalAlpha = 0.85;
    c.fillStyle = back;
    c.fillRect(left - 3, y - 10, w + 6, 13);
    c.globalAlpha = 1;
  }
  c.fillStyle = ink;
  c.fillText(text, x, y);
}
function cut(c, text, room, end) {
  if (c.measureText(text).width <= room) return text;
  const kept = count => end ? `…${text.slice(text.length - count)}` : `${text.slice(0, count)}…`;
  let low = 0, high = text.length;
  while (low < high) { const middle = (low + high + 1) >> 1; c.measureText(kept(middle)).width <= room ? low = middle : high = middle - 1; }
  return kept(low);
}
