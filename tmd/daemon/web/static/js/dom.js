// Builds nodes and turns what is shown into what is wanted. Only text nodes hold text of the cluster:
// it is never read as markup.

export const byId = (id) => document.getElementById(id);

/** A node. In `props`, `style` is an object and all else an attribute. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "style") Object.entries(value).forEach(([k, v]) => node.style.setProperty(k, v));
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined).map(
    (child) => (child instanceof Node ? child : String(child))));
  return node;
}

const keyOf = (node) => (node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("data-key") : null);

/** Makes the children of `parent` equal to `wanted`. Nodes stay where they can, and with them the
 * focus, the selection and open details. */
export function show(parent, wanted) {
  const keyed = new Map();
  for (const node of parent.childNodes) if (keyOf(node)) keyed.set(keyOf(node), node);
  let place = parent.firstChild;
  for (const want of wanted) {
    const key = keyOf(want);
    const known = key ? keyed.get(key) : place && !keyOf(place) ? place : null;
    if (!known || known.nodeName !== want.nodeName) {
      parent.insertBefore(want, place);
      continue;
    }
    if (known === place) place = place.nextSibling;
    else parent.insertBefore(known, place);
    turnInto(known, want);
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

function turnInto(node, want) {
  if (node.isEqualNode(want)) return;
  if (node.nodeType !== Node.ELEMENT_NODE) {
    node.nodeValue = want.nodeValue;
    return;
  }
  for (const { name } of [...node.attributes]) {
    if (!want.hasAttribute(name) && name !== "open") node.removeAttribute(name);
  }
  for (const { name, value } of want.attributes) {
    // The policy forbids a style as an attribute, not through the object model.
    if (name === "style") node.style.cssText = want.style.cssText;
    else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  }
  show(node, [...want.childNodes]);
}

export function table(head, rows, key = () => null) {
  if (!rows.length) return el("p", { class: "none" }, "none");
  return el("table", {},
    el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, rows.map(([of, ...cells]) => el("tr", { "data-key": key(of) },
      cells.map((cell) => el("td", {}, cell ?? ""))))));
}

export const chip = (text, kind = "") => el("span", { class: `chip ${kind}` }, text);

/** A state, which its own name colours. */
export const state = (text) => chip(text, text.replaceAll(" ", "-"));
