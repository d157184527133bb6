// The address is where all state lives. Controls write into it, and it sets the controls: after a link, or Back.
(function () {
  "use strict";
  // What only the tree and the colours need: a change of these draws nothing anew.
  const OF_TREE = new Set(["find", "order", "theme", "open"]);
  const OF_ALL_RUNS = new Set(["order", "theme"]);
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
    if (kind === "branches") return params.getAll(name).filter((value) => value !== "");
    return params.get(name);
  }

  function choose(params, module) {
    params.set("module", module);
    if (!OF_MODULE.has(params.get("tab"))) params.set("tab", "module");
  }

  function write(params, name, kind, value, fallback) {
    if (kind === "node") {
      if (value && value.length) choose(params, value[0].slice(1)); // a click on the module shown does not leave it
      return;
    }
    if (kind === "branches") {
      params.delete(name);
      if (!value || sameSet(value, fallback)) return;
      // None open is something to say too.
      (value.length ? value : [""]).forEach((branch) => params.append(name, branch));
      return;
    }
    // A choice that is not among those there are empties its control; what is wrong with it is for the page to say.
    if (value === null || value === undefined) return;
    params.delete(name);
    if (kind === "list") value.forEach((item) => params.append(name, item));
    else if (value !== fallback) params.set(name, String(value));
  }

  const sameSet = (one, other) => one.length === other.length && one.every((item) => other.includes(item));

  function textOf(params, left) {
    const kept = new URLSearchParams();
    params.forEach((value, name) => { if (!left.has(name)) kept.append(name, value); });
    const text = kept.toString();
    return text ? "?" + text : "";
  }

  // What Back or Forward led to: that is taken as it is. A link in the page keeps what its address does not say.
  let returned = null;
  window.addEventListener("popstate", () => { returned = window.location.search; });
  let shown = null;

  function carry(params) {
    const goesOn = params.get("run") === shown.get("run");
    OF_TREE.forEach((name) => {
      if (params.has(name) || (!goesOn && !OF_ALL_RUNS.has(name))) return;
      shown.getAll(name).forEach((value) => params.append(name, value));
    });
    const text = textOf(params, new Set()) || "?";
    window.history.replaceState(window.history.state, "", text);
    return text;
  }

  const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

  // Not by way of outputs: Dash would draw every control that may change anew, before and after each click.
  const ours = {};
  function set(field, before, value) {
    if (same(before, value)) return;
    const at = field.id.lastIndexOf(".");
    ours[field.id] = value;
    window.dash_clientside.set_props(field.id.slice(0, at), { [field.id.slice(at + 1)]: value });
  }

  function placeOf(params) {
    const main = document.getElementById("content");
    const width = Math.max(400, Math.round((main ? main.clientWidth : 1000) / 100) * 100);
    return { query: textOf(params, OF_TREE), dark: isDark(params.get("theme")), width: width };
  }

  // While the button is pressed, and React finds out what that changes, the server draws already.
  window.addEventListener("pointerdown", (event) => {
    const module = event.target.closest("#at-module [data-module]");
    const tab = event.target.closest("#at-tab [role=tab]");
    if (event.button !== 0 || shown === null || (!module && !tab) || event.target.closest(".tree-arrow")) return;
    const params = new URLSearchParams(shown);
    if (module) choose(params, module.dataset.module);
    else write(params, "tab", "text", tab.id.split("-tab-").pop(), "overview");
    window.statsbridge.askAhead(placeOf(params));
  }, true);

  // The server's own picture makes room once the contents are there, with theirs drawn.
  const seen = new MutationObserver(() => {
    const contents = document.querySelector("#content[data-place]");
    if (!contents || (contents.querySelector(".dash-graph") && !contents.querySelector(".main-svg"))) return;
    seen.disconnect();
    const first = document.getElementById("first-picture");
    if (first) first.remove();
  });
  seen.observe(document.body, { childList: true, subtree: true, attributes: true, attributeFilter: ["data-place"] });

  // Inputs: url.search, then every control. States: the controls' names, kinds and defaults; token; last step; the
  // branches that are open unless the address says otherwise; place, run and colours as they are.
  function sync(search, ...rest) {
    const context = window.dash_clientside.callback_context;
    const [fields, token, last, branches, placeBefore, runBefore, themeBefore] = rest.slice(-7);
    const values = rest.slice(0, fields.length);
    const changed = context.triggered.map((one) => one.prop_id);
    const params = new URLSearchParams(search || "");
    const fallbackOf = (field) => ({ step: last, open: branches }[field.name] ?? field.fallback);
    let address = unchanged();
    if (changed.length === 0 || changed.includes("url.search")) {
      if (shown !== null && search !== returned) address = carry(params);
      returned = null;
      fields.forEach((field, index) => {
        if (field.kind === "branches" && !branches) return; // no tree yet: it will come with those that are to be open
        set(field, values[index], read(params, field.name, field.kind, fallbackOf(field)));
      });
    } else {
      const were = new URLSearchParams(params);
      const differs = (name) => params.get(name) !== were.get(name);
      fields.forEach((field, index) => {
        if (!changed.includes(field.id)) return;
        const echo = field.id in ours && same(ours[field.id], values[index]);
        delete ours[field.id];
        if (!echo) write(params, field.name, field.kind, values[index], fallbackOf(field));
      });
      if (differs("tab")) {
        const index = fields.findIndex((field) => field.name === "tab");
        set(fields[index], values[index], params.get("tab") || "overview");
      }
      // Another tree: what was open in the one before says nothing of it.
      if (differs("run") || differs("find")) params.delete("open");
      if (params.toString() !== were.toString()) address = textOf(params, new Set()) || "?";
    }
    shown = params;
    const place = placeOf(params);
    const run = params.get("run") || "";
    const link = window.location.origin + "/" + (textOf(params, new Set()) || "?");
    document.body.className = "tab-" + (run ? params.get("tab") || "overview" : "runs");
    set({ id: "theme.forceColorScheme" }, themeBefore, place.dark ? "dark" : "light");
    return [
      address,
      same(placeBefore, place) ? unchanged() : place,
      same(runBefore, run) ? unchanged() : run,
      link + (link.endsWith("?") ? "" : "&") + "token=" + encodeURIComponent(token),
      placeBefore ? unchanged() : GRAPH,
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
