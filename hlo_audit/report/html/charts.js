"use strict";
// Draws the charts and filters the findings. The page is whole without it.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const wide = window.matchMedia("(min-width: 45.01rem)");

  function element(name, className, text) {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function bytes(count) {
    let value = count;
    for (const unit of ["B", "kB", "MB", "GB"]) {
      if (value < 999.5) return `${unit === "B" ? value : Number(value.toPrecision(3))} ${unit}`;
      value /= 1000;
    }
    return `${Number(value.toPrecision(3))} TB`;
  }

  const number = (count) => count.toLocaleString("en-US");

  function draw(options) {
    const svg = Plot.plot({ className: "plot", style: { background: "none" }, ...options });
    // The page's policy allows no style but its own, which says the same.
    for (const style of svg.querySelectorAll("style")) style.remove();
    svg.setAttribute("role", "img");
    return svg;
  }

  // -- the passes

  // The chart holds a count for each snapshot; the data only where it changes.
  function readings(series, length) {
    const all = [];
    for (let position = 0, next = 0; position < length; position++) {
      if (series.points[next]?.[0] === position) next++;
      const point = series.points[Math.max(0, next - 1)];
      all.push({ position, count: point ? point[1] : null, bytes: point ? point[2] : null });
    }
    return all;
  }

  const fullName = ({ name, title }) => (title ? `${name} ${title}` : name);

  function seriesChart(timeline, series, label, all, key, width) {
    const most = all.reduce((sum, one) => Math.max(sum, one[key] ?? 0), 0);
    const form = key === "bytes" ? bytes : number;
    const first = all.find((one) => one[key] !== null);
    const last = all.findLast((one) => one[key] !== null);
    const marked = key === "count" ? series.lasting : [];
    const rises = marked.filter(([, added]) => added).map(([position]) => all[position]);
    const falls = marked.filter(([, , removed]) => removed).map(([position]) => all[position]);
    const at = { x: "position", y: (one) => one[key] };
    // A pass can add some for good and take others away: both are seen, side by side.
    const triangle = (found, others, rotate, color) =>
      [
        [found.filter((one) => !others.includes(one)), 0],
        [found.filter((one) => others.includes(one)), rotate ? 4 : -4],
      ].map(([some, dx]) =>
        Plot.dot(some, { ...at, symbol: "triangle", rotate, r: 3.5, fill: color, dx }),
      );
    return draw({
      width,
      height: 62,
      marginTop: 10,
      marginBottom: 8,
      marginLeft: 58,
      marginRight: 12,
      ariaLabel: `${fullName(series)} of ${label}, ${key} after each pass`,
      ariaDescription:
        first &&
        `first ${form(first[key])}, most ${form(most)}, last ${form(last[key])}; the tables below have all changes`,
      x: { domain: [0, Math.max(1, all.length - 1)], axis: null },
      y: { domain: [0, most || 1], axis: null },
      marks: [
        Plot.ruleY([0], { stroke: "currentColor", strokeOpacity: 0.35 }),
        Plot.axisY(most ? [0, most] : [0], { tickFormat: form, tickSize: 3, label: null }),
        Plot.areaY(all, { ...at, curve: "step-after", fill: "var(--area)" }),
        Plot.lineY(all, { ...at, curve: "step-after", stroke: "var(--bar)", strokeWidth: 1.5 }),
        ...triangle(rises, falls, 0, "var(--bad)"),
        ...triangle(falls, rises, 180, "var(--good)"),
        Plot.tip(
          all.filter((one) => one[key] !== null),
          Plot.pointerX({
            ...at,
            anchor: "bottom",
            title: (one) => `${timeline.passes[one.position]}\n${fullName(series)}: ${form(one[key])}`,
          }),
        ),
      ],
    });
  }

  function seriesName(series) {
    const made = element("div", "series-name", series.name);
    if (series.title) made.append(element("small", "", series.title));
    return made;
  }

  function timelineChart(box, timeline) {
    const label = box.dataset.label;
    const rows = timeline.series.map((series) => ({
      series,
      all: readings(series, timeline.passes.length),
    }));
    const moving = rows.filter(({ all }) => all.some((one) => one.count));
    const still = rows.filter((row) => !moving.includes(row));
    const width = wide.matches
      ? Math.max(160, (box.clientWidth - 32 - 11 * 15 - 2 * 15) / 2)
      : box.clientWidth - 16;
    const parts = [];
    const head = element("div", "series series-head");
    head.setAttribute("aria-hidden", "true");
    head.append(
      element("span", "", `${number(timeline.passes.length)} snapshots, left to right`),
      element("span", "", "count"),
      element("span", "", "bytes of the results"),
    );
    parts.push(head);
    for (const { series, all } of moving) {
      const row = element("div", "series");
      row.append(
        seriesName(series),
        seriesChart(timeline, series, label, all, "count", width),
        seriesChart(timeline, series, label, all, "bytes", width),
      );
      parts.push(row);
    }
    parts.push(
      element(
        "p",
        "muted",
        "▲ a pass adds some that no later pass takes back, ▼ it takes some away for good",
      ),
    );
    if (still.length) {
      const names = still.map(({ series }) => fullName(series)).join(", ");
      parts.push(element("p", "muted", `Never there as an instruction of its own: ${names}`));
    }
    box.replaceChildren(...parts);
  }

  // -- the costs

  function costChart(box, costs) {
    const byBytes = costs.some((one) => one.bytes);
    const rows = costs.filter((one) => (byBytes ? one.bytes : one.cycles));
    if (!rows.length) {
      box.hidden = true;
      return;
    }
    const measure = byBytes ? "bytes" : "cycles";
    const taken = byBytes
      ? "Size of what the warnings copy or send"
      : "Cycles that the warnings take";
    const most = Math.max(...rows.map((one) => one[measure]));
    const said = (one) =>
      [
        byBytes && bytes(one.bytes),
        one.cycles && `${number(one.cycles)} est. cycles`,
        `${number(one.count)} ${one.count === 1 ? "finding" : "findings"}`,
      ]
        .filter(Boolean)
        .join(" · ");
    const parts = [element("h3", "small-head", `${taken} in a step`)];
    for (const program of new Set(rows.map((one) => one.program))) {
      const mine = rows.filter((one) => one.program === program);
      const labelWidth = wide.matches ? 260 : 0;
      const width = box.clientWidth - (wide.matches ? 34 : 18);
      const lines = wide.matches ? 26 : 40;
      parts.push(element("p", "muted", program));
      parts.push(
        draw({
          width,
          height: mine.length * lines + 8,
          marginTop: 4,
          marginBottom: 4,
          marginLeft: 58,
          marginRight: labelWidth + 12,
          ariaLabel: `${taken} in a step, by rule: ${program}`,
          ariaDescription: mine.map((one) => `${one.rule}: ${said(one)}`).join("; "),
          x: { domain: [0, most], axis: null },
          y: { domain: mine.map((one) => one.rule), label: null, tickSize: 0 },
          marks: [
            Plot.barX(mine, {
              x: measure,
              y: "rule",
              fill: "var(--bar)",
              insetTop: 5,
              insetBottom: wide.matches ? 5 : 20,
            }),
            Plot.text(mine, {
              x: wide.matches ? measure : 0,
              y: "rule",
              text: said,
              textAnchor: "start",
              dx: wide.matches ? 6 : 1,
              dy: wide.matches ? 0 : 11,
              fill: "currentColor",
            }),
          ],
        }),
      );
    }
    box.replaceChildren(...parts);
  }

  function drawAll() {
    for (const box of document.querySelectorAll("[data-chart]")) {
      const timeline = data.timelines[box.dataset.chart];
      const isCosts = box.dataset.chart === "costs";
      if (!timeline && !(isCosts && data.costs.length)) continue;
      box.hidden = false;
      // What is closed has no width, and is drawn when it is opened.
      if (box.clientWidth === 0 || box.drawnWidth === box.clientWidth) continue;
      box.drawnWidth = box.clientWidth;
      if (isCosts) costChart(box, data.costs);
      else timelineChart(box, timeline);
    }
  }

  // -- the list of findings

  const findings = [...document.querySelectorAll(".finding")];
  const form = document.querySelector(".filter");
  if (form) {
    form.hidden = false;
    const fields = form.elements;
    const apply = () => {
      const text = fields.text.value.trim().toLowerCase();
      let shown = 0;
      for (const one of findings) {
        one.hidden = !(
          (!fields.rule.value || one.dataset.rule === fields.rule.value) &&
          (!fields.program.value ||
            one.dataset.programs.split(" ").includes(fields.program.value)) &&
          (!text || one.textContent.toLowerCase().includes(text))
        );
        shown += !one.hidden;
      }
      fields.shown.value = shown === findings.length ? "" : `${number(shown)} of ${number(findings.length)}`;
    };
    form.addEventListener("input", apply);
    form.addEventListener("submit", (event) => event.preventDefault());
    fields.open.addEventListener("click", () => {
      const open = fields.open.textContent === "Open all";
      for (const one of findings) one.open = open && !one.hidden;
      fields.open.textContent = open ? "Close all" : "Open all";
    });
    apply(); // a browser may have kept what was filled in
  }

  // -- paper shows what is closed on the screen

  let opened = [];
  window.addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll(".finding, .timeline, .entry")].filter(
      (one) => !one.open,
    );
    for (const one of opened) one.open = true;
    drawAll();
  });
  window.addEventListener("afterprint", () => {
    for (const one of opened) one.open = false;
  });

  for (const one of document.querySelectorAll("details")) one.addEventListener("toggle", drawAll);
  window.addEventListener("resize", drawAll);
  drawAll();
})();
