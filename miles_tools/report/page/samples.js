"use strict";
// The list of a step's samples, with search and filters. Steps are asked for one at a time.
(() => {
  const { make, show } = miles;
  const SHOWN = 200, FOUND = 300;
  const view = make("div", {});
  const at = {};  // controls by name
  let overview = null, state = { run: 0, kind: "train", step: null, row: null };
  let entries = [], list = [], shown = SHOWN, searching = 0, turn = 0;

  const control = (name, label, node) => { at[name] = node; node.setAttribute("aria-label", label); return make("label", {}, label, node); };
  const options = (node, pairs) => node.replaceChildren(...pairs.map(([value, text]) => make("option", { value, text })));
  const orders = {
    order: ["order of generation", () => 0],
    high: ["reward, highest first", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)],
    low: ["reward, lowest first", (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity)],
    gap: ["log-prob gap, largest first", (a, b) => (b.gap ?? -1) - (a.gap ?? -1)],
    long: ["longest first", (a, b) => b.length - a.length],
    short: ["shortest first", (a, b) => a.length - b.length],
  };

  const build = () => {
    const number = () => make("input", { type: "number", step: "any" });
    const before = at.before = make("button", { type: "button", text: "‹", title: "previous step  [", "aria-label": "previous step" });
    const after = at.after = make("button", { type: "button", text: "›", title: "next step  ]", "aria-label": "next step" });
    at.all = make("button", { type: "button", text: "search all steps", title: "apply the filters to every step, newest first" });
    at.follow = make("input", { type: "checkbox", checked: true });
    at.count = make("span", { className: "count", role: "status" });
    const filters = make("details", { className: "filters", open: !matchMedia("(max-width: 760px)").matches }, make("summary", { text: "Filters" }), make("div", {},
      control("text", "text", make("input", { type: "search", placeholder: "prompt, response, calls" })),
      make("span", {}, control("least", "reward ≥", number()), control("most", "≤", number())),
      make("span", {}, control("short", "tokens ≥", number()), control("long", "≤", number())),
      control("status", "status", make("select")), at.all));
    const choose = make("div", { className: "choose" },
      control("run", "run", make("select")), control("kind", "of", make("select")),
      make("span", {}, before, control("step", "step", make("select")), after),
      control("sort", "sort", make("select")), control("colour", "colour", make("select")),
      miles.live ? make("label", { title: "show the newest step as soon as it is complete; off once you choose a sample" }, at.follow, "follow") : null, at.count, filters);
    options(at.sort, Object.entries(orders).map(([value, [text]]) => [value, text]));
    options(at.colour, Object.entries(miles.colourings).map(([value, { name }]) => [value, name]));
    options(at.status, [["", "any"]]);
    at.list = make("div", { className: "list", role: "listbox", "aria-label": "samples", tabIndex: 0 });
    at.one = make("div", { className: "one", role: "region", "aria-label": "sample", tabIndex: 0 });
    view.replaceChildren(make("div", { className: "browser" }, choose, at.list, at.one));
    at.run.onchange = () => { state = { ...state, run: +at.run.value, step: null, row: null }; sync(); load(); };
    at.kind.onchange = () => { state = { ...state, kind: at.kind.value, step: null, row: null }; sync(); load(); };
    at.step.onchange = () => { go(+at.step.value); };
    before.onclick = () => move(-1);
    after.onclick = () => move(1);
    let timer = 0;
    at.text.oninput = () => { clearTimeout(timer); timer = setTimeout(load, 300); };
    for (const name of ["least", "most", "short", "long", "status", "sort"]) at[name].oninput = () => { state.row = null; fill(); };
    at.colour.onchange = () => open();
    at.all.onclick = () => searching ? (searching = 0, turn++, count()) : everywhere();
    at.list.onkeydown = event => {
      const to = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
      if (to) { event.preventDefault(); stay(); pick(Math.max(0, Math.min(list.length - 1, selected() + to))); }
    };
  };

  const steps = () => overview.runs[state.run]?.steps[state.kind] ?? [];
  const newest = () => steps().at(-1) ?? null;
  const sync = () => {
    const wanted = JSON.stringify(overview.runs.map(r => r.label));
    if (at.run.dataset.runs !== wanted) { at.run.dataset.runs = wanted; options(at.run, overview.runs.map((r, i) => [i, r.label])); }
    at.run.parentElement.hidden = overview.runs.length < 2;
    const kinds = [["train", "training"], ["eval", "evaluation"]].filter(([kind]) => overview.runs[state.run].steps[kind]?.length);
    if (kinds.length && !kinds.some(([kind]) => kind === state.kind)) state.kind = kinds[0][0];
    options(at.kind, kinds);
    at.kind.parentElement.hidden = kinds.length < 2;
    if (state.step === null || !steps().includes(state.step)) state.step = newest();
    if (at.step.options.length !== steps().length || at.step.options[0]?.value !== String(steps()[0])) options(at.step, steps().map(step => [step, step]));
    at.run.value = state.run; at.kind.value = state.kind; at.step.value = state.step;
    at.before.disabled = state.step === steps()[0];
    at.after.disabled = state.step === newest();
  };
  const go = step => { state = { ...state, step, row: null }; stay(); sync(); return load(); };
  const showFollow = () => at.follow.parentElement?.toggleAttribute("hidden", overview.runs.every(run => run.status.state === "finished"));
  const stay = () => { at.follow.checked = false; };
  const move = by => { const to = steps()[steps().indexOf(state.step) + by]; if (to !== undefined) go(to); };

  const passes = s => {
    const limit = (name, value, sign) => at[name].value === "" || (value !== null && sign * value >= sign * +at[name].value);
    return limit("least", s.reward, 1) && limit("most", s.reward, -1) && limit("short", s.length, 1) && limit("long", s.length, -1) && (!at.status.value || s.status === at.status.value);
  };
  const ask = async step => {
    const found = await miles.source.samples(state.run, state.kind, step, at.text.value.trim());
    return found.map(entry => ({ ...entry, step, kind: state.kind, run: state.run }));
  };
  const load = async () => {
    searching = 0;
    const mine = ++turn;
    if (state.step === null) {
      entries = list = [];
      at.list.replaceChildren();
      at.one.replaceChildren(make("p", { text: "No samples are stored yet. A run stores those of each step, unless --no-save-rollouts is set." }));
      count();
      return;
    }
    try {
      const found = await ask(state.step);
      if (mine !== turn) return;
      entries = found;
      fill();
    } catch (error) {
      if (mine !== turn) return;
      entries = list = [];
      at.list.replaceChildren();
      at.one.replaceChildren(make("p", { className: "problem", text: error.message }));
      count();
    }
  };
  /** Apply the filters to all steps, newest first, until enough samples are found. */
  const everywhere = async () => {
    const mine = ++turn, all = [...steps()].reverse();
    entries = [];
    let damaged = 0;
    searching = 1;
    for (const [number, step] of all.entries()) {
      try { entries.push(...(await ask(step)).filter(passes)); } catch { damaged++; }
      if (mine !== turn) return;
      searching = number + 1;
      if (number === 0 || entries.length !== list.length) fill(true);
      count();
      if (entries.length >= FOUND) break;
    }
    const seen = searching;
    searching = 0;
    fill();
    at.count.textContent = `${list.length} found in ${seen} of ${all.length} steps${damaged ? `; ${damaged} files are damaged` : ""}`;
  };
  const count = () => {
    at.all.textContent = searching ? "stop" : "search all steps";
    at.count.textContent = searching ? `${entries.length} found in ${searching} of ${steps().length} steps …` : list.length === entries.length ? `${list.length} samples` : `${list.length} of ${entries.length} samples`;
  };
  const same = (a, b) => a && b && a.row === b.row && a.step === b.step && a.kind === b.kind && a.run === b.run;
  const selected = () => Math.max(0, list.findIndex(s => s === state.chosen));
  const fill = (keep = false) => {
    const statuses = [...new Set(entries.map(s => s.status))].sort();
    const status = at.status.value;
    options(at.status, [["", "any"], ...[...new Set([...statuses, status].filter(Boolean))].map(s => [s, s])]);
    at.status.value = status;
    list = entries.filter(passes).sort(orders[at.sort.value][1]);
    shown = SHOWN;
    items();
    count();
    if (keep && list.some(s => same(s, state.chosen))) return;
    const found = list.findIndex(s => s.row === state.row && s.step === state.step);
    if (list.length) pick(Math.max(0, found));
    else at.one.replaceChildren(make("p", { className: "soft", text: entries.length ? "No sample of this step passes the filters." : "No sample was found." }));
  };
  const items = () => {
    const mixed = new Set(list.map(s => s.step)).size > 1;
    at.list.replaceChildren(...list.slice(0, shown).map((s, i) => {
      const item = make("button", { type: "button", role: "option", tabIndex: -1, id: `sample-${i}`, "aria-selected": "false" },
        make("span", { className: "first", text: s.preview || "(empty)" }), make("span", { className: "right", text: show(s.reward) }),
        make("span", { className: "small", text: [mixed ? `step ${s.step}` : "", s.status, `${s.length} tokens`, s.images ? `${s.images} image${s.images > 1 ? "s" : ""}` : "", s.answers > 1 ? `${s.answers} answers` : ""].filter(Boolean).join(" · ") }),
        make("span", { className: "small right", text: s.gap === null ? "" : "gap " + show(s.gap, 2) }));
      item.onclick = () => { stay(); pick(i); at.list.focus({ preventScroll: true }); };
      return item;
    }));
    if (list.length > shown) {
      const more = make("button", { type: "button", text: `show more (${list.length - shown})` });
      more.onclick = () => { shown += SHOWN; items(); mark(); };
      at.list.append(more);
    }
  };
  const mark = () => {
    const number = selected();
    for (const [i, item] of [...at.list.children].entries()) item.setAttribute("aria-selected", i === number);
    const item = at.list.children[number];
    at.list.setAttribute("aria-activedescendant", item?.id ?? "");
    if (item) at.list.scrollTop = Math.min(Math.max(at.list.scrollTop, item.offsetTop + item.offsetHeight - at.list.offsetTop - at.list.clientHeight), item.offsetTop - at.list.offsetTop);
  };
  const pick = number => {
    if (!list[number]) return;
    while (number >= shown) { shown += SHOWN; items(); }
    state.chosen = list[number];
    state.row = list[number].row;
    mark();
    miles.remember(`samples/${list[number].run}/${list[number].kind}/${list[number].step}/${list[number].row}`);
    return open();
  };
  const open = async () => {
    const s = state.chosen;
    if (!s) return;
    const peak = Math.max(1e-9, ...entries.map(e => e.peak));
    try {
      const found = await miles.source.sample(s.run, s.kind, s.step, s.row);
      if (state.chosen !== s) return;
      miles.thread(at.one, found, at.colour.value, peak, number => miles.source.image(s.run, s.kind, s.step, s.row, number));
      at.one.scrollTop = 0;
    } catch (error) {
      at.one.replaceChildren(make("p", { className: "problem", text: error.message }));
    }
  };

  miles.samples = {
    node: view,
    /** Open the view at a place such as ["0", "train", "12", "3"]. */
    open: place => {
      const first = !at.list;
      if (first) build();
      showFollow();
      if (place.length === 4) {
        state = { ...state, run: Math.min(+place[0] || 0, overview.runs.length - 1), kind: place[1], step: +place[2], row: +place[3] };
        stay();
      }
      sync();
      if (first || place.length === 4) load();
    },
    /** Take new data of the runs; show the newest step if the reader follows. */
    update: data => {
      overview = data;
      if (!at.list) return;
      showFollow();
      const to = newest(), follow = miles.live && at.follow.checked && !searching && to !== state.step;
      if (follow) state = { ...state, step: to, row: null };
      sync();
      if (follow) load();
    },
    keys: {
      "j": () => { stay(); pick(Math.min(list.length - 1, selected() + 1)); }, "k": () => { stay(); pick(Math.max(0, selected() - 1)); },
      "[": () => move(-1), "]": () => move(1), "/": () => { at.text.closest("details").open = true; at.text.focus(); },
      "c": () => { at.colour.selectedIndex = (at.colour.selectedIndex + 1) % at.colour.options.length; open(); },
    },
  };
})();
