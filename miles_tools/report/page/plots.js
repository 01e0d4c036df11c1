"use strict";
// Plots: lines with bands, stacks and heat maps. Each is drawn when it comes into view, and keeps its zoom when new steps arrive.
(() => {
  const { make, show } = miles;
  const SMOOTH_FROM = 60;
  const settings = { smooth: true, each: false };
  const cards = new Map();  // key -> {node, plot, chart}
  const faint = (colour, alpha) => colour + Math.round(alpha * 255).toString(16).padStart(2, "0");

  /** Centred moving average over about a fifteenth of the points. */
  const smooth = values => {
    const half = Math.max(0, Math.min(Math.floor(values.length / 30), 12));
    return values.map((value, i) => {
      if (value === null) return null;
      const near = values.slice(Math.max(0, i - half), i + half + 1).filter(v => v !== null);
      return near.reduce((a, b) => a + b, 0) / near.length;
    });
  };
  /** Whether a line oscillates much more than it changes overall. */
  const noisy = values => {
    const known = values.filter(v => v !== null);
    let way = 0;
    for (let i = 1; i < known.length; i++) way += Math.abs(known[i] - known[i - 1]);
    const [low, high] = known.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
    return way > 3 * (high - low) && high > low;
  };

  /** Columns, series and bands of uPlot for a plot. */
  const layers = plot => {
    const columns = [plot.x], series = [{ label: "step", value: (u, v) => v === null || v === undefined ? "last" : String(v) }], bands = [];
    const points = plot.x.length <= 30;
    const add = (values, options) => { columns.push(values); series.push({ spanGaps: true, points: { show: false }, ...options }); return series.length - 1; };
    const quiet = { value: () => "", class: "quiet" };
    if (plot.kind === "stack") {
      const base = plot.x.map(() => 0);
      const tops = plot.lines.map(line => line.mid.map((v, i) => (base[i] += v ?? 0)));
      [...plot.lines.keys()].reverse().forEach(i => {
        const colour = miles.colour(i), own = plot.lines[i].mid;
        add(tops[i], { label: plot.lines[i].label, stroke: colour, width: 1, fill: faint(colour, .75), value: (u, v, s, at) => show(at === null || at === undefined ? own.findLast(x => x !== null) : own[at]) });
      });
      // a band cuts the fill of each layer off where the one below begins
      for (let i = 1; i < plot.lines.length; i++) bands.push({ series: [i, i + 1], fill: faint(miles.colour(plot.lines.length - i), .75) });
      return { columns, series, bands };
    }
    plot.lines.forEach((line, i) => {
      const colour = miles.colour(i);
      const soft = settings.smooth && !line.marked && line.mid.length >= SMOOTH_FROM && noisy(line.mid);
      const curve = values => soft ? smooth(values) : values;
      if (line.low && !(settings.each && plot.each.length)) {
        const high = add(curve(line.high), { label: "", stroke: "transparent", width: 0, ...quiet });
        const low = add(curve(line.low), { label: "", stroke: "transparent", width: 0, ...quiet });
        bands.push({ series: [high, low], fill: faint(colour, .17) });
      }
      if (settings.each) for (const run of plot.each.filter(r => r.line === i)) add(curve(run.mid), { label: run.label, stroke: faint(colour, .55), width: 1 });
      const raw = line.mid;
      if (soft) add(raw, { label: "", stroke: faint(colour, .3), width: 1, ...quiet });
      add(curve(raw), {
        label: line.label, stroke: colour, width: 2, points: { show: points || line.marked, size: 5, fill: colour },
        value: (u, v, s, at) => at === null || at === undefined ? number(plot, raw.findLast(x => x !== null)) : number(plot, raw[at]) + (line.low && line.low[at] !== null ? ` (${number(plot, line.low[at])} … ${number(plot, line.high[at])})` : ""),
      });
    });
    return { columns, series, bands };
  };
  const number = (plot, value) => value === null || value === undefined ? "–" : plot.percent ? (100 * value).toPrecision(3) + "%" : show(value, 4);

  const logarithmic = plot => {
    const values = plot.lines.flatMap(line => line.mid).filter(v => v !== null);
    const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    return plot.log && values.length > 0 && low > 0 && high / low > 20;
  };

  const draw = card => {
    const { plot, node } = card;
    const { columns, series, bands } = layers(plot);
    const shape = JSON.stringify([series.map(s => s.label), logarithmic(plot), bands.length, miles.dark.matches]);
    if (card.chart && card.shape === shape) {
      card.chart.bad = plot.bad;
      const { min, max } = card.chart.scales.x;
      const zoomed = card.zoomed;
      card.chart.series.forEach((s, i) => { if (series[i].value) s.value = series[i].value; });
      card.chart.setData(columns, !zoomed);
      if (zoomed) card.chart.setScale("x", { min, max });
      return;
    }
    card.chart?.destroy();
    card.shape = shape;
    const axis = { stroke: miles.css("--soft"), grid: { stroke: miles.css("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const log = logarithmic(plot);
    card.chart = new uPlot({
      width: node.clientWidth - 22, height: 190, series, bands,
      scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (u, low, high) => range(plot, low, high) } },
      axes: [
        { ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000], size: 26 },
        { ...axis, size: 54, grid: log ? { ...axis.grid, filter: (u, ticks) => ticks.map(v => Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-9 ? v : null) } : axis.grid, values: (u, ticks) => ticks.map(v => v === null ? "" : plot.percent ? +(100 * v).toPrecision(3) + "%" : compact(v)) },
      ],
      cursor: { sync: { key: "step" }, points: { size: 7 }, drag: { x: true, y: false } },
      legend: { live: true },
      hooks: {
        setScale: [(u, key) => { if (key === "x") card.zoomed = u.scales.x.min > plot.x[0] || u.scales.x.max < u.data[0].at(-1); }],
        draw: [u => {
          u.ctx.strokeStyle = miles.css("--bad");
          u.ctx.setLineDash([3, 3]);
          for (const step of u.bad || []) {
            const x = u.valToPos(step, "x", true);
            u.ctx.beginPath(); u.ctx.moveTo(x, u.bbox.top); u.ctx.lineTo(x, u.bbox.top + u.bbox.height); u.ctx.stroke();
          }
          u.ctx.setLineDash([]);
        }],
      },
    }, columns, node);
    card.chart.bad = plot.bad;
    // lines without a name are parts of another one
    [...node.querySelectorAll(".u-legend .u-series")].forEach((row, i) => { if (i > 0 && series[i]?.label === "") row.hidden = true; });
  };
  const compact = v => v === 0 ? "0" : Math.abs(v) >= 1e4 && Math.abs(v) < 1e7 ? +(v / 1e3).toPrecision(5) + "k" : Math.abs(v) >= 1e7 || Math.abs(v) < 1e-3 ? v.toExponential(1).replace(/\.0e/, "e").replace("e+", "e") : String(+v.toPrecision(4));
  const range = (plot, low, high) => {
    if (low === null) return [0, 1];
    if (plot.percent) return [0, Math.max(1.1 * high, .02)];
    if (plot.kind === "stack") return [0, 1.05 * high || 1];
    const size = Math.max(Math.abs(low), Math.abs(high));
    if (high - low < 1e-6 * size) return [low - size / 20, high + size / 20];  // rounding only
    if (size === 0) return [-.04, 1];
    const margin = .06 * (high - low);
    return [low - margin, high + margin];
  };

  const heat = ({ plot, node }) => {
    const { values, names, rows, columns } = plot.grid;
    const known = values.flat().filter(v => v !== null);
    const low = known.reduce((a, b) => Math.min(a, b), Infinity), high = known.reduce((a, b) => Math.max(a, b), -Infinity);
    const canvas = make("canvas", { width: Math.max(1, values[0]?.length ?? 1), height: Math.max(1, values.length), role: "img", "aria-label": `${plot.title}: ${show(low)} to ${show(high)} ${plot.unit}` });
    const pen = canvas.getContext("2d");
    const stops = [[0, 32, 77], [124, 123, 120], [255, 234, 70]];  // cividis: its lightness grows with the value
    const shade = v => { const i = v < .5 ? 0 : 1, t = 2 * v - i; return `rgb(${stops[i].map((c, n) => Math.round(c + t * (stops[i + 1][n] - c)))})`; };
    values.forEach((row, y) => row.forEach((v, x) => { if (v !== null) { pen.fillStyle = shade(high > low ? (v - low) / (high - low) : .5); pen.fillRect(x, y, 1, 1); } }));
    const every = Math.ceil(names.length / 16);
    const list = make("div", { className: "names", title: rows }, ...names.filter((_, i) => i % every === 0).map(text => make("span", { text })));
    const at = make("p", { className: "soft", text: `${columns} →  ·  ${show(low)} (dark) to ${show(high)} (light) ${plot.unit}` });
    canvas.onpointermove = event => {
      const box = canvas.getBoundingClientRect();
      const y = Math.floor((event.clientY - box.top) / box.height * values.length), x = Math.floor((event.clientX - box.left) / box.width * values[0].length);
      if (values[y]?.[x] !== undefined) at.textContent = `${rows} ${names[y]}, ${columns} ${x}: ${show(values[y][x], 4)} ${plot.unit}`;
    };
    node.querySelector(".heat")?.remove();
    node.querySelector("p")?.remove();
    node.append(make("div", { className: "heat" }, list, canvas), at);
  };
  const render = card => card.plot.kind === "grid" ? heat(card) : draw(card);

  const seen = new IntersectionObserver(entries => {
    for (const entry of entries) {
      const card = cards.get(entry.target.dataset.key);
      if (!card) continue;
      card.visible = entry.isIntersecting;
      if (card.visible && card.stale) { card.stale = false; render(card); }
    }
  }, { rootMargin: "300px" });
  const sized = new ResizeObserver(entries => {
    for (const entry of entries) cards.get(entry.target.dataset.key)?.chart?.setSize({ width: entry.target.clientWidth - 22, height: 190 });
  });
  const mark = card => { card.stale = !card.visible; if (card.visible) render(card); };

  const makeCard = (key, plot) => {
    const caption = make("figcaption", {}, make("span", { text: plot.title }), make("span", { className: "unit", text: plot.kind === "grid" ? "" : plot.unit }));
    const node = make("figure", { tabIndex: 0, "aria-label": `plot: ${plot.title}` }, caption);
    node.dataset.key = key;
    const card = { node, plot, chart: null, visible: false, stale: true };
    node.onkeydown = event => {
      const u = card.chart, to = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!u || !to) return;
      event.preventDefault();
      const at = Math.max(0, Math.min(u.data[0].length - 1, (u.cursor.idx ?? (to > 0 ? -1 : u.data[0].length)) + to));
      u.setCursor({ left: u.valToPos(u.data[0][at], "x"), top: 40 });
    };
    cards.set(key, card);
    seen.observe(node);
    sized.observe(node);
    return card;
  };

  /** Show the plots of ``sections`` in ``place``; plots that are there are updated. */
  miles.plots = (place, sections) => {
    const layout = JSON.stringify(sections.map(s => [s.title, s.plots.map(p => p.name)]));
    if (place.dataset.layout !== layout) {
      const open = new Set([...place.querySelectorAll("details[open]")].map(d => d.dataset.title));
      place.dataset.layout = layout;
      for (const card of cards.values()) { card.chart?.destroy(); seen.unobserve(card.node); sized.unobserve(card.node); }
      cards.clear();
      place.replaceChildren(...sections.map(section => {
        const grid = make("div", { className: "plots" }, ...section.plots.map(plot => makeCard(section.title + "/" + plot.name, plot).node));
        if (!section.folded) return make("section", {}, make("h2", { text: section.title }), grid);
        const fold = make("details", { open: open.has(section.title) }, make("summary", { text: `${section.title} (${section.plots.length})` }), grid);
        fold.dataset.title = section.title;
        return fold;
      }));
    }
    for (const section of sections) for (const plot of section.plots) {
      const card = cards.get(section.title + "/" + plot.name);
      card.plot = plot;
      mark(card);
    }
  };
  const again = () => { for (const card of cards.values()) mark(card); };
  miles.dark.addEventListener("change", again);
  miles.plotTools = several => {
    const box = (text, name) => {
      const input = make("input", { type: "checkbox", checked: settings[name] });
      input.onchange = () => { settings[name] = input.checked; again(); };
      return make("label", {}, input, text);
    };
    return make("div", { className: "tools" }, box("smooth noisy lines", "smooth"), several ? box("a line for each run", "each") : null,
      make("span", { className: "soft", text: "Drag to zoom, double-click to reset; arrow keys move the cursor of a focused plot." }));
  };
})();
