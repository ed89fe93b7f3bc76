// Search needs a worker, and browsers start none for pages opened as files. There the worker's script runs in a hidden
// frame instead, which gets and posts the same messages. (The theme would load this from a server.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = (this.inside = frame.contentWindow);
      inside.document.open();
      inside.document.write(
        "<script>postMessage = data => parent.postMessage(data, '*');" +
          "importScripts = (...urls) => Promise.all(urls.map(url => new Promise((done, failed) => {" +
          "const script = document.createElement('script'); script.src = url; script.onload = done;" +
          "script.onerror = failed; document.body.append(script); })));</script>" +
          `<body><script src="${url}"></script>`
      );
      inside.document.close();
      this.loaded = new Promise((done) => (inside.onload = done));
      window.addEventListener("message", (event) => {
        if (event.source === inside) {
          event.stopImmediatePropagation();
          this.dispatchEvent(new MessageEvent("message", { data: event.data }));
        }
      });
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
