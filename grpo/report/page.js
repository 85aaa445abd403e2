"use strict";
// The page is complete without this script, except for the browser of rollouts and full sizes.

const element = (name, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
};

// Tooltips of marks for touch: a click shows the title of the mark.
const tip = element("div", { className: "tip", role: "status", hidden: true });
document.body.append(tip);
document.addEventListener("click", (event) => {
  let mark = event.target.closest("svg g");
  while (mark && !mark.querySelector(":scope > title")) mark = mark.parentElement.closest("g");
  tip.hidden = !mark;
  if (!mark) return;
  tip.textContent = mark.querySelector(":scope > title").textContent;
  const left = Math.min(event.clientX, document.documentElement.clientWidth - tip.offsetWidth - 8);
  tip.style.left = `${window.scrollX + Math.max(8, left)}px`;
  tip.style.top = `${window.scrollY + event.clientY + 14}px`;
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") tip.hidden = true;
});

// Full size of images and figures; Escape closes a dialog by itself.
const dialog = document.getElementById("full-size");
const shown = document.getElementById("full-size-content");
const enlarge = (title, ...content) => {
  dialog.setAttribute("aria-label", title);
  shown.replaceChildren(...content);
  dialog.showModal();
};
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close();
});
for (const image of document.querySelectorAll("main img")) {
  image.tabIndex = 0;
  image.setAttribute("role", "button");
  const open = () => {
    const copy = element("img", { src: image.src, alt: image.alt, className: image.className });
    enlarge(image.alt, copy, element("p", { textContent: image.alt }));
  };
  image.addEventListener("click", open);
  image.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    open();
  });
}
for (const figure of document.querySelectorAll("#figures figure")) {
  const title = figure.querySelector("h3").textContent;
  const button = element("button", { type: "button", textContent: "Full size and values" });
  button.setAttribute("aria-label", `Full size and values: ${title}`);
  button.addEventListener("click", () => {
    const copy = figure.querySelector("svg").cloneNode(true);
    const values = [...copy.querySelectorAll("title")].map((each) => each.textContent);
    const list = element("ul", {}, ...values.map((each) => element("li", { textContent: each })));
    enlarge(title, element("h2", { textContent: title }), copy, list);
  });
  figure.querySelector("figcaption").append(button);
}

// The browser of rollouts.
const source = document.getElementById("rollout-data");
if (source) {
  const { families, policies, prompts } = JSON.parse(source.textContent);
  const PER_PAGE = 10;
  const form = document.getElementById("rollout-filter");
  const list = document.getElementById("rollout-list");
  const count = document.getElementById("rollout-count");
  let page = 0;

  const KEEPS = {
    all: () => true,
    fixed: (before, after) => !before && after,
    broken: (before, after) => before && !after,
    right: (before, after) => before && after,
    wrong: (before, after) => !before && !after,
  };
  const options = (name, values) =>
    form.elements[name].append(...values.map((text, value) => new Option(text, value)));
  options("policy", policies);
  options("against", policies);
  options("family", families);
  form.elements.policy.value = String(policies.length - 1);

  // A rollout is [text, is right, start and end of the answer, start and end of the difference].
  const draw = (title, [text, isRight, start, end, from, to]) => {
    const mark = element("span", {
      className: `mark ${isRight ? "solved" : "failed"}`,
      textContent: isRight ? "✓ right" : "✗ wrong",
    });
    const answer = element("span", { className: "answer" }, text.slice(start, from));
    if (to > from) answer.append(element("mark", { textContent: text.slice(from, to) }));
    answer.append(text.slice(to, end));
    const written = element("pre", {}, text.slice(0, start), answer, text.slice(end));
    if (!text) written.textContent = "(empty)";
    const head = element("p", { className: "note", textContent: `${title} ` }, mark);
    const box = element("div", { className: "sample" }, head, written);
    if (start < 0) {
      written.textContent = text || "(empty)";
      box.append(element("p", { className: "note", textContent: "The judge found no answer." }));
    }
    return box;
  };

  const update = () => {
    const [policy, against] = [Number(form.elements.policy.value), Number(form.elements.against.value)];
    const family = form.elements.family.value;
    const keeps = KEEPS[form.elements.change.value];
    const words = form.elements.words.value.toLowerCase();
    const contains = (each) =>
      [each.prompt, each.answer, each.rollouts[policy][0]].some((text) => text.toLowerCase().includes(words));
    const found = prompts.filter(
      (each) =>
        (family === "all" || each.family === Number(family)) &&
        keeps(each.rollouts[against][1], each.rollouts[policy][1]) &&
        contains(each),
    );
    const pages = Math.max(1, Math.ceil(found.length / PER_PAGE));
    page = Math.min(Math.max(page, 0), pages - 1);
    count.textContent = `${found.length} of ${prompts.length} prompts, page ${page + 1} of ${pages}`;
    form.elements.previous.disabled = page === 0;
    form.elements.next.disabled = page === pages - 1;
    list.replaceChildren(
      ...found.slice(page * PER_PAGE, (page + 1) * PER_PAGE).map((each) => {
        const drawn = [...new Set([against, policy])].map((i) => draw(policies[i], each.rollouts[i]));
        return element(
          "li",
          { className: "card" },
          element("p", { className: "note", textContent: families[each.family] }),
          element("pre", { textContent: each.prompt }),
          element("p", {}, "Reference answer: ", element("code", { textContent: each.answer || "(none)" })),
          element("div", { className: "grid" }, ...drawn),
        );
      }),
    );
  };
  form.addEventListener("input", () => {
    page = 0;
    update();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.elements.previous.addEventListener("click", () => {
    page -= 1;
    update();
  });
  form.elements.next.addEventListener("click", () => {
    page += 1;
    update();
  });
  document.getElementById("rollout-browser").hidden = false;
  document.getElementById("needs-script").remove();
  update();
}
