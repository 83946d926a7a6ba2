// What scrolls sideways can be reached by the keyboard; the theme's search and the buttons of code have names.
const SCROLLING = ".md-typeset pre > code, .md-typeset__scrollwrap, .formula";

function reachable() {
  for (const part of document.querySelectorAll(SCROLLING)) {
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
    else part.removeAttribute("tabindex");
  }
}

document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
reachable();
addEventListener("load", reachable);
addEventListener("resize", reachable);

let labelled = 0;
new MutationObserver(() => {
  for (const nav of document.querySelectorAll(".md-code__nav:not([aria-label])")) {
    nav.setAttribute("aria-label", `Code ${++labelled}`);
  }
}).observe(document.body, { childList: true, subtree: true });
