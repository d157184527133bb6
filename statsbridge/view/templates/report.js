"use strict";
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const plots = [...document.querySelectorAll(".plot")];
  let printing = false;
  const options = { displaylogo: false, responsive: true };

  function figureOf(plot, inDark) {
    const stored = JSON.parse(document.getElementById(plot.dataset.figure).textContent);
    if (inDark) {
      for (const [path, value] of stored.dark) {
        const last = path.length - 1;
        let place = stored.figure;
        for (const key of path.slice(0, last)) place = place[key];
        place[path[last]] = value;
      }
    }
    return stored.figure;
  }

  // Reading plotly.js takes longer than all the rest: not before the first picture comes near.
  function loadPlotly() {
    if (window.Plotly) return;
    const script = document.createElement("script");
    script.textContent = document.getElementById("plotly").textContent;
    document.head.append(script);
  }

  function draw(plot) {
    const inDark = dark.matches && !printing;
    const theme = inDark ? "dark" : "light";
    if (plot.dataset.drawn === theme) return;
    loadPlotly();
    plot.dataset.drawn = theme;
    const figure = figureOf(plot, inDark);
    Plotly.react(plot, figure.data, figure.layout, options);
  }

  // A page of forty pictures would take seconds to open: each is drawn when it comes near the window.
  const near = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) draw(entry.target);
      }
    },
    { rootMargin: "600px 0px" },
  );
  plots.forEach((plot) => near.observe(plot));

  dark.addEventListener("change", () => {
    plots.filter((plot) => plot.dataset.drawn).forEach(draw);
  });
  // On paper all is light, and nothing waits to come near.
  window.addEventListener("beforeprint", () => {
    printing = true;
    plots.forEach(draw);
  });
  window.addEventListener("afterprint", () => {
    printing = false;
    plots.forEach(draw);
  });

  for (const input of document.querySelectorAll("input[data-table]")) {
    const rows = [...document.querySelectorAll(`#${input.dataset.table} tbody tr`)];
    const texts = rows.map((row) => `${row.cells[1].textContent} ${row.cells[2].textContent}`.toLowerCase());
    const count = document.getElementById(`${input.dataset.table}-count`);
    const search = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, place) => {
        row.hidden = !words.every((word) => texts[place].includes(word));
        shown += row.hidden ? 0 : 1;
      });
      count.textContent = `${shown} of ${rows.length}`;
    };
    input.addEventListener("input", search);
    search();
  }

  // A link to a row that the search has hidden shows it again.
  window.addEventListener("hashchange", () => {
    const row = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (row && row.hidden) {
      const input = document.querySelector(`input[data-table="${row.closest("table").id}"]`);
      input.value = "";
      input.dispatchEvent(new Event("input"));
      row.scrollIntoView();
    }
  });

  function compare(column, up) {
    return (one, other) => {
      const keys = [one, other].map((row) => {
        const cell = row.cells[column];
        return "sort" in cell.dataset ? cell.dataset.sort : cell.textContent.trim();
      });
      // What has no number comes last either way.
      if ((keys[0] === "") !== (keys[1] === "")) return keys[0] === "" ? 1 : -1;
      const numbers = keys.map(Number);
      const order = numbers.some(Number.isNaN) ? keys[0].localeCompare(keys[1]) : numbers[0] - numbers[1];
      return up ? order : -order;
    };
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const headers = [...table.tHead.rows[0].cells];
    headers.forEach((header, column) => {
      header.addEventListener("click", () => {
        const up = !header.classList.contains("up");
        headers.forEach((other) => other.classList.remove("up", "down"));
        header.classList.add(up ? "up" : "down");
        const body = table.tBodies[0];
        body.append(...[...body.rows].sort(compare(column, up)));
      });
    });
  }
})();
