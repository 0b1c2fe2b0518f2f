// Search where pages are opened from the disk: browsers refuse to start a worker from a file, so a
// hidden frame runs the worker's script instead. It speaks to the page as a worker would.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.ready = new Promise((resolve) => {
        frame.addEventListener("load", () => {
          const inside = frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inside.document.createElement("script");
          script.src = new URL(url, location.href).href;
          script.addEventListener("load", () => resolve(inside));
          inside.document.head.append(script);
        });
      });
      frame.srcdoc = "<!doctype html>";
      const attach = () => document.body.append(frame);
      if (document.body) attach();
      else addEventListener("DOMContentLoaded", attach);
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
  };
}
