// Elements without HTML text: what a caller wrote is set as text or as an attribute, never parsed.

/** Return a new element with attributes, listeners (`onclick` …) and children.
 * @template {keyof HTMLElementTagNameMap} Tag @param {Tag} tag
 * @param {Record<string, unknown>} [attributes] false and null are left out, true is an empty attribute
 * @param {...(Node | string)} children @returns {HTMLElementTagNameMap[Tag]} */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), /** @type {EventListener} */ (value));
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children);
  return element;
}

/** Return a control inside its label. @param {string} text @param {HTMLElement} control */
export const labelled = (text, control) => make("label", {}, `${text} `, control);
