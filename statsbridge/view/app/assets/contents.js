// What the page shows at a place: asked of the server, and put on the screen with as little drawn anew as that takes.
(function () {
  "use strict";
  const unchanged = () => window.dash_clientside.no_update;
  const same = (one, other) => one === other || JSON.stringify(one) === JSON.stringify(other);
  const isNested = (one) => one !== null && typeof one === "object";
  const isComponent = (one) => isNested(one) && "namespace" in one && "props" in one;

  async function ask(place) {
    const headers = { "Content-Type": "application/json" };
    const response = await fetch("/contents", { method: "POST", headers: headers, body: JSON.stringify(place) });
    if (!response.ok) throw new Error("the contents could not be had: " + response.status);
    return response.json();
  }

  // The place that a button is pressed for, and what the server will have said of it once the button is let go.
  let pressed = null;
  function askAhead(place) {
    pressed = { place: place, answer: ask(place).catch(() => null) };
  }

  // The properties to set, each [id, properties], that make `before` what `after` is; null where parts come or go.
  // React would make all that is inside new components anew, and Plotly draws a new figure far slower than a changed one.
  function differences(before, after) {
    if (Array.isArray(before) && Array.isArray(after)) {
      if (before.length !== after.length) return null;
      const found = before.map((one, index) => differences(one, after[index]));
      return found.includes(null) ? null : found.flat();
    }
    if (!isComponent(before) || !isComponent(after)) return same(before, after) ? [] : null;
    const were = before.props, are = after.props;
    const names = Object.keys(are);
    const isAlike = before.namespace === after.namespace && before.type === after.type && same(were.id, are.id);
    if (!isAlike || !same(Object.keys(were), names)) return null;
    const isInside = isNested(were.children) && isNested(are.children);
    const inside = isInside ? differences(were.children, are.children) : [];
    const isKept = (name) => (isInside && name === "children" ? inside !== null : same(were[name], are[name]));
    const changed = names.filter((name) => !isKept(name));
    if (changed.length === 0) return inside;
    if (are.id === undefined) return null;
    return [[are.id, Object.fromEntries(changed.map((name) => [name, are[name]]))], ...(inside || [])];
  }

  // Inputs: the place, and the version that there is now. States: what was drawn; the calls there are to choose from.
  let asked = 0;
  let shown = { number: 0, contents: null };
  async function draw(place, fresh, drawn, calls) {
    const nothing = Array(5).fill(unchanged());
    const number = ++asked;
    // What asked is not what counts: of two requests at once Dash forgets the answer to the first.
    if (!place || (drawn && drawn.version === fresh && same(drawn.place, place))) return nothing;
    const before = drawn && drawn.number === shown.number ? shown.contents : null;
    const ahead = pressed !== null && same(pressed.place, place) ? pressed.answer : null;
    pressed = null;
    const answer = (await ahead) || (await ask(place));
    if (number !== asked) return nothing;
    shown = { number: number, contents: answer.contents };
    const changes = before === null ? null : differences(before, answer.contents);
    (changes || []).forEach(([id, properties]) => window.dash_clientside.set_props(id, properties));
    return [
      changes === null ? answer.contents : unchanged(),
      place.query,
      { ...answer.drawn, place: place, number: number },
      ...(same(calls, answer.calls) ? [unchanged(), unchanged()] : [answer.calls, answer.calls.length < 2]),
    ];
  }

  // A click on a picture, for the server to find its module. Figures that come and go are none.
  function point() {
    const clicked = window.dash_clientside.callback_context.triggered.find((one) => one.value && one.value.points);
    return clicked && clicked.value.points.length ? clicked.value : unchanged();
  }

  window.statsbridge = { askAhead: askAhead };
  window.dash_clientside = Object.assign({}, window.dash_clientside, { contents: { draw, point } });
})();
