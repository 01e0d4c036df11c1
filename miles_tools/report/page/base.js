"use strict";
// Shared by the files of this page: elements, numbers, colours, and where the data comes from. Texts of runs are only ever set as text.
const miles = {};
(() => {
  /** make("p", {className, text, other properties}, ...children) */
  miles.make = (tag, options = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(options)) {
      if (value === undefined || value === null) continue;
      if (name === "text") made.textContent = value;
      else if (name in made && !name.startsWith("aria")) made[name] = value;
      else made.setAttribute(name, value);
    }
    made.append(...children.filter(child => child !== null && child !== undefined));
    return made;
  };
  miles.table = (columns, rows, { numbers = [], className = "" } = {}) => {
    const { make } = miles;
    const cell = (tag, text, i) => make(tag, { className: numbers.includes(i) ? "n" : i === 0 ? "name" : "" }, text instanceof Node ? text : String(text ?? ""));
    const head = columns.length ? [make("thead", {}, make("tr", {}, ...columns.map((c, i) => cell("th", c, i))))] : [];
    const body = make("tbody", {}, ...rows.map(row => make("tr", {}, ...row.map((c, i) => cell("td", c, i)))));
    return make("div", { className: "scroll" }, make("table", { className }, ...head, body));
  };
  miles.show = (value, digits = 3) => {
    if (value === null || value === undefined) return "–";
    return value && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7) ? value.toExponential(digits - 1) : String(+value.toPrecision(digits));
  };
  miles.duration = s => s < 10 ? s.toFixed(1) + " s" : s < 120 ? s.toFixed(0) + " s" : s < 7200 ? (s / 60).toFixed(0) + " min" : s < 172800 ? (s / 3600).toFixed(1) + " h" : (s / 86400).toFixed(0) + " days";
  miles.css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // Okabe and Ito's colours, lighter on dark pages.
  const PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B98300", "#2E9BD6", "#8C6D31", "#6A51A3"];
  const DARK = ["#56B4E9", "#F0803C", "#2CC49A", "#E09AC4", "#E6B422", "#9AD4F5", "#C9A86A", "#A593D8"];
  miles.dark = matchMedia("(prefers-color-scheme: dark)");
  miles.colour = i => (miles.dark.matches ? DARK : PALETTE)[i % PALETTE.length];

  const inside = JSON.parse(document.getElementById("data").textContent || "null");
  /** Where the data comes from: the page itself (a report), or the server of miles watch. */
  miles.live = inside === null;
  const get = async (path, query) => {
    const answer = await fetch(path + "?" + new URLSearchParams(query));
    if (answer.status === 204) return null;
    const found = await answer.json().catch(() => ({ problem: `the server answered ${answer.status}` }));
    if (!answer.ok) throw new Error(found.problem);
    return found;
  };
  miles.source = miles.live ? {
    overview: have => get("overview", { have }),
    samples: (run, kind, step, text) => get("samples", { run, kind, step, text }),
    sample: (run, kind, step, row) => get("sample", { run, kind, step, row }),
    image: (run, kind, step, row, number) => "image?" + new URLSearchParams({ run, kind, step, row, number }),
  } : {
    overview: async have => have ? null : inside.overview,
    samples: async (run, kind, step, text) => {
      const wanted = text.toLowerCase();
      const found = inside.samples.filter(s => s.run === run && s.kind === kind && s.step === step);
      return found.filter(s => !wanted || [s.pieces.join(""), s.response, s.label, JSON.stringify([s.prompt, s.calls, s.turns])].join("\n").toLowerCase().includes(wanted));
    },
    sample: async (run, kind, step, row) => inside.samples.find(s => s.run === run && s.kind === kind && s.step === step && s.row === row),
    image: (run, kind, step, row, number) => inside.samples.find(s => s.run === run && s.kind === kind && s.step === step && s.row === row)?.media?.[number] ?? "",
  };
})();
