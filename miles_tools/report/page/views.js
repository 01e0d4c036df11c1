"use strict";
// The views besides samples: overview, workers, metrics and the plan.
(() => {
  const { make, show, table } = miles;
  const several = data => data.runs.length > 1;
  const heading = (data, run) => several(data) ? [make("h2", { text: run.label })] : [];

  const overview = { node: make("div", {}), top: make("div", {}), plots: make("div", {}) };
  overview.node.append(overview.top, overview.plots);
  overview.update = data => {
    const parts = [];
    for (const run of data.runs) {
      if (run.problem) parts.push(make("p", { className: "problem", text: run.problem }));
      if (several(data)) continue;
      parts.push(make("section", { className: "cards" }, ...run.cards.map(card => make("div", { className: "card" },
        make("div", { className: "label", text: card.label }), make("div", { className: "value", text: card.value }), make("div", { className: "note", text: card.note })))));
    }
    if (several(data)) parts.push(...compare(data));
    const hints = new Map();  // the same hint of several runs is shown once
    for (const run of data.runs) for (const hint of run.hints) hints.set(hint, [...(hints.get(hint) ?? []), run.label]);
    if (hints.size) parts.push(make("h2", { text: "Hints" }), ...[...hints].map(([hint, labels]) => make("div", { className: "hint", text: several(data) ? `${labels.join(", ")}: ${hint}` : hint })));
    overview.top.replaceChildren(...parts);
    if (!overview.tools && data.sections.length) overview.plots.before(overview.tools = miles.plotTools(several(data)));
    miles.plots(overview.plots, data.sections);
  };
  const compare = data => [
    make("h2", { text: "Options that differ" }),
    data.differences.length ? table(["option", ...data.runs.map(r => r.label)], data.differences.map(([name, values]) => [name, ...values])) : make("p", { text: "All options and versions of plugins are equal." }),
  ];

  const bar = (share, text) => {
    const inner = make("div", { className: "bar" });
    inner.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
    return make("div", {}, make("div", { className: "track" }, inner), make("span", { className: "soft", text }));
  };
  const workers = { node: make("div", {}) };
  workers.update = data => {
    workers.node.replaceChildren(...data.runs.flatMap(run => {
      const most = Math.max(1e-9, ...run.workers.map(w => w.busy?.last ?? 0));
      const rows = run.workers.map(w => [w.name,
        w.busy ? bar(w.busy.last / most, `${show(w.busy.last)} s, median ${show(w.busy.median)} s`) : "",
        w.idle ? bar(w.idle.last, `${(100 * w.idle.last).toFixed(0)}%, median ${(100 * w.idle.median).toFixed(0)}%`) : ""]);
      const found = rows.length ? table(["worker", "time with work in the last step", "share of the step without work"], rows) : make("p", { className: "soft", text: "No worker processes were recorded: the run computes in one process, or has not completed a step." });
      return [...heading(data, run), several(data) ? null : make("h2", { text: "Workers" }), found, make("h2", { text: "Machine" }), table([], run.environment)].filter(Boolean);
    }));
  };

  const metrics = { node: make("div", {}) };
  metrics.update = data => {
    const filter = metrics.filter ??= make("input", { type: "search", placeholder: "filter by name", "aria-label": "filter metrics by name" });
    const place = metrics.place ??= make("div", {});
    const fill = () => {
      const wanted = filter.value.toLowerCase(), fits = name => name.toLowerCase().includes(wanted);
      if (several(data)) {
        const names = [...new Set(data.runs.flatMap(r => r.rows.map(row => row[0])))].filter(fits);
        const last = data.runs.map(r => new Map(r.rows.map(row => [row[0], row[2]])));
        place.replaceChildren(table(["metric", ...data.runs.map(r => r.label)], names.map(name => [name, ...last.map(m => m.get(name) ?? "-")])));
      } else place.replaceChildren(...data.runs.map(run => table(["metric", "first", "last", "best", "lowest", "highest", ""], run.rows.filter(row => fits(row[0])), { numbers: [1, 2, 3, 4, 5], className: "metrics" })));
    };
    filter.oninput = fill;
    if (!metrics.node.children.length) metrics.node.append(make("div", { className: "tools" }, filter), make("div", {}), place);
    const budgets = data.runs.flatMap(run => run.budgets.flatMap(budget => [
      make("h2", { text: `${budget.title}${several(data) ? ", " + run.label : ""}` }),
      table(budget.columns, budget.rows, { numbers: [1, 2, 3] })]));
    metrics.node.children[1].replaceChildren(...budgets, ...(budgets.length ? [make("h2", { text: "Metrics" })] : []));
    fill();
  };

  const plan = { node: make("div", {}) };
  plan.update = data => {
    const layout = JSON.stringify(data.runs.map(r => [r.plan.digest, r.changed]));
    if (plan.layout === layout) return;
    plan.layout = layout;
    plan.node.replaceChildren(...data.runs.flatMap(run => {
      const p = run.plan, parts = heading(data, run);
      if (p.digest) parts.push(make("div", { className: "chips" }, ...[["plan", p.digest], ["miles-core", p.core], ...p.plugins.map(x => [x.name, x.version])].map(([name, text]) => make("span", { className: "chip" }, name + " ", make("b", { text })))));
      if (!p.digest) parts.push(make("p", { className: "soft", text: "This run has no plan.json." }));
      const rows = [...(p.plugins ?? []).map(x => ["plugin " + x.name, `${x.version}, ${x.source}; active because of ${x.because}`]),
        ...(p.sets ?? []).map(x => ["set by " + x.plugin, `${x.path} = ${x.value}`]), ...(p.advice ?? []).map(x => ["advice", String(x)])];
      if (rows.length) parts.push(make("h2", { text: "Plan" }), table([], rows));
      if (run.changed.length) parts.push(make("h2", { text: "Configuration that differs from the defaults" }), table([], run.changed));
      if (p.facts?.length) {
        const filter = make("input", { type: "search", placeholder: "filter facts", "aria-label": "filter facts" }), place = make("div", {});
        const fill = () => place.replaceChildren(table(["fact", "value", "from", "flag"], p.facts.filter(f => f.join(" ").toLowerCase().includes(filter.value.toLowerCase()))));
        filter.oninput = fill;
        const fold = make("details", {}, make("summary", { text: `Facts (${p.facts.length})` }), filter, place);
        fold.ontoggle = () => { if (fold.open && !place.children.length) fill(); };
        parts.push(fold);
      }
      return parts;
    }));
  };
  miles.views = { overview, workers, metrics, plan };
})();
