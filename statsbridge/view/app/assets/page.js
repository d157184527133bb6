// The address is where all state lives. Controls write into it, and it sets the controls: after a link, or Back.
(function () {
  "use strict";
  // What only the tree and the colours need: a change of these draws nothing anew.
  const OF_TREE = new Set(["find", "order", "theme", "open"]);
  // A click on a module opens its series, except where the tab is about one module already.
  const OF_MODULE = new Set(["module", "histograms"]);
  const GRAPH = {
    namespace: "dash_core_components", type: "Graph", props: { id: "warm-graph", config: { staticPlot: true } },
  };

  const unchanged = () => window.dash_clientside.no_update;
  const isDark = (theme) =>
    theme === "dark" || (theme !== "light" && window.matchMedia("(prefers-color-scheme: dark)").matches);

  function read(params, name, kind, fallback) {
    if (!params.has(name)) return fallback;
    if (kind === "list") return params.getAll(name);
    if (kind === "number") {
      const number = Number(params.get(name));
      return Number.isFinite(number) ? number : fallback;
    }
    if (kind === "node") return ["." + params.get(name)];
    return params.get(name);
  }

  function write(params, name, kind, value, fallback) {
    if (kind === "node") {
      if (!value || value.length === 0) return; // a click on the module shown does not leave it
      params.set(name, value[0].slice(1));
      return;
    }
    // A choice that is not among those there are empties its control; what is wrong with it is for the page to say.
    if (value === null || value === undefined) return;
    params.delete(name);
    if (kind === "list") value.forEach((item) => params.append(name, item));
    else if (value !== fallback) params.set(name, String(value));
  }

  function textOf(params, left) {
    const kept = new URLSearchParams();
    params.forEach((value, name) => { if (!left.has(name)) kept.append(name, value); });
    const text = kept.toString();
    return text ? "?" + text : "";
  }

  // Inputs: url.search, then every control. States: the controls' names, kinds and defaults; last step; place; token.
  function sync(search, ...rest) {
    const context = window.dash_clientside.callback_context;
    const fields = rest[rest.length - 4];
    const last = rest[rest.length - 3];
    const before = rest[rest.length - 2];
    const token = rest[rest.length - 1];
    const values = rest.slice(0, fields.length);
    const changed = context.triggered.map((one) => one.prop_id);
    const params = new URLSearchParams(search || "");
    const controls = fields.map(unchanged);
    let address = unchanged();
    if (changed.length === 0 || changed.includes("url.search")) {
      fields.forEach((field, index) => {
        const fallback = field.name === "step" && last !== null ? last : field.fallback;
        controls[index] = read(params, field.name, field.kind, fallback);
      });
    } else {
      const were = params.toString();
      fields.forEach((field, index) => {
        if (!changed.includes(field.id)) return;
        const fallback = field.name === "step" ? last : field.fallback;
        write(params, field.name, field.kind, values[index], fallback);
        const tab = fields.findIndex((other) => other.name === "tab");
        if (field.kind === "node" && values[index] && values[index].length && !OF_MODULE.has(params.get("tab"))) {
          params.set("tab", "module");
          controls[tab] = "module";
        }
      });
      if (params.toString() !== were) address = textOf(params, new Set()) || "?";
    }
    const dark = isDark(params.get("theme"));
    const main = document.getElementById("content");
    const width = Math.max(400, Math.round((main ? main.clientWidth : 1000) / 100) * 100);
    const place = { query: textOf(params, OF_TREE), dark: dark, width: width };
    const same = before && JSON.stringify(before) === JSON.stringify(place);
    const run = params.get("run") || "";
    const link = window.location.origin + "/" + (textOf(params, new Set()) || "?");
    return [
      address,
      same ? unchanged() : place,
      before && new URLSearchParams(before.query).get("run") === (run || null) ? unchanged() : run,
      dark ? "dark" : "light",
      "tab-" + (run ? params.get("tab") || "overview" : "runs"),
      link + (link.endsWith("?") ? "" : "&") + "token=" + encodeURIComponent(token),
      before ? unchanged() : GRAPH,
      ...controls,
    ];
  }

  // What the sliders stand at, in words.
  function say(step, smoothing, last) {
    const at = step === null || step === undefined ? "" : String(step);
    return [at && step === last ? at + " (the last)" : at, smoothing === 0 ? "off" : String(smoothing)];
  }

  // One module in the tree. React makes text of whatever a module is called.
  function moduleNode({ node, expanded, hasChildren, elementProps, tree }) {
    const make = window.React.createElement;
    const told = node.nodeProps;
    const toggle = (event) => {
      event.stopPropagation();
      tree.toggleExpanded(node.value);
    };
    const arrow = make("span", {
      className: "tree-arrow" + (hasChildren ? (expanded ? " open" : "") : " none"),
      onClick: hasChildren ? toggle : undefined,
    });
    const parts = [arrow, make("span", { className: "tree-name" }, node.label)];
    if (told.mark) parts.push(make("span", { className: "tree-mark " + told.severity }, told.mark));
    parts.push(make("span", { className: "tree-type" }, told.type));
    if (told.depth !== null) parts.push(make("span", { className: "tree-depth" }, String(told.depth)));
    const classes = elementProps.className + " tree-label" + (told.called ? "" : " uncalled");
    const nodeProps = { ...elementProps, className: classes, title: told.title, "data-module": node.value.slice(1) };
    return make("div", nodeProps, ...parts);
  }

  window.dashMantineFunctions = Object.assign({}, window.dashMantineFunctions, { moduleNode });
  window.dash_clientside = Object.assign({}, window.dash_clientside, { page: { sync, say } });
})();
