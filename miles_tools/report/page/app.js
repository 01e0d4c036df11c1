"use strict";
// The page: which view is shown, what the keys do, and new data while runs work.
(() => {
  const { make } = miles;
  const at = id => document.getElementById(id);
  const views = { overview: ["Overview", miles.views.overview], samples: ["Samples", miles.samples], workers: ["Workers", miles.views.workers], metrics: ["Metrics", miles.views.metrics], plan: ["Plan", miles.views.plan] };
  let data = null, current = "", received = 0, misses = 0;

  miles.remember = place => { if (current === "samples") history.replaceState(null, "", "#" + place); };
  const show = name => {
    const [view, ...place] = name.split("/");
    current = views[view] ? view : "overview";
    for (const tab of at("views").children) {
      const on = tab.dataset.view === current;
      tab.setAttribute("aria-selected", on);
      tab.tabIndex = on ? 0 : -1;
    }
    const [title, shown] = views[current];
    at("main").replaceChildren(shown.node);
    at("main").setAttribute("aria-label", title);
    shown.update(data);
    shown.open?.(place);
  };
  const header = () => {
    const several = data.runs.length > 1;
    document.title = data.title + " · miles";
    at("title").textContent = data.title;
    at("runs").replaceChildren(...data.runs.map(run => {
      const parts = [];
      if (several) {
        const group = data.groups.findIndex(g => g.runs.includes(run.label));
        const dot = make("span", { className: "dot" });
        dot.style.background = miles.colour(data.groups.length > 1 ? group : 0);
        parts.push(dot, make("b", { text: run.label }));
      }
      const since = run.status.age === null ? "" : run.status.text.replace(/the last one .*? ago/, `the last one ${miles.duration(run.status.age + (miles.live ? (Date.now() - received) / 1000 : 0))} ago`);
      parts.push(make("span", { className: "status", text: since || run.status.text }));
      return make("div", { className: "run", title: run.path }, ...parts);
    }));
    at("footer").textContent = `${miles.live ? "Served" : "Written " + data.made} by miles-core ${data.core}. ${miles.live ? "" : "Samples are a selection; all are in rollouts/ of the run, and every value in metrics.jsonl. "}Press ? for keys.`;
  };
  const receive = found => {
    data = found;
    received = Date.now();
    header();
    miles.samples.update(data);
    if (current && current !== "samples") views[current][1].update(data);
  };
  const say = (text, lost = false) => {
    const node = at("connection");
    node.hidden = !text;
    node.className = lost ? "lost" : "";
    node.textContent = text;
  };
  const follow = async () => {
    let wait = data.runs.some(run => run.status.state !== "finished") ? 2000 : 10000;
    if (!document.hidden) {
      try {
        const found = await miles.source.overview(data.version);
        misses = 0;
        say(data.runs.some(run => run.status.state === "running") ? "live" : "");
        if (found) receive(found);
        else header();
      } catch (error) {
        misses++;
        say(`No answer from miles watch (${error.message}). Start it again, and open the address that it prints.`, true);
        wait = Math.min(30000, 2000 * misses);
      }
    }
    setTimeout(follow, wait);
  };
  const keys = [["1 … 5", "views"], ["j, k or ↓, ↑", "next or previous sample"], ["[, ]", "previous or next step"], ["/", "search samples"], ["c", "next colouring of tokens"], ["←, →", "cursor of a focused plot"], ["?", "this list"]];
  const press = event => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const number = "12345".indexOf(event.key);
    if (number >= 0) location.hash = Object.keys(views)[number];
    else if (event.key === "?") { at("keys").open ? at("keys").close() : at("keys").showModal(); }
    else if (current === "samples" && miles.samples.keys[event.key]) miles.samples.keys[event.key]();
    else if (event.key === "/") { location.hash = "samples"; setTimeout(miles.samples.keys["/"], 50); }
    else return;
    event.preventDefault();
  };
  const start = async () => {
    try {
      receive(await miles.source.overview(""));
    } catch (error) {
      at("main").replaceChildren(make("p", { className: "problem", text: error.message }));
      return;
    }
    at("views").append(...Object.entries(views).map(([name, [text]], i) => {
      const tab = make("button", { type: "button", role: "tab", text, title: `key ${i + 1}` });
      tab.dataset.view = name;
      tab.onclick = () => { location.hash = name; };
      return tab;
    }));
    at("views").onkeydown = event => {
      const to = { ArrowLeft: -1, ArrowRight: 1 }[event.key], names = Object.keys(views);
      if (!to) return;
      location.hash = names[(names.indexOf(current) + to + names.length) % names.length];
      setTimeout(() => at("views").querySelector("[aria-selected=true]").focus());
    };
    at("keys").append(miles.table([], keys.map(([key, what]) => [make("kbd", { text: key }), what])), make("form", { method: "dialog" }, make("button", { text: "close" })));
    addEventListener("hashchange", () => show(location.hash.slice(1)));
    addEventListener("keydown", press);
    show(location.hash.slice(1));
    if (miles.live) follow();
    document.documentElement.dataset.ready = Math.round(performance.now());
  };
  start();
})();
