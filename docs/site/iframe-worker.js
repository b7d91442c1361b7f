// Search in pages that were opened from a folder: browsers start no worker from file://, so its
// script runs in a hidden frame. The theme's script of the search looks for IFrameWorker.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.IFrameWorker = window.IFrameWorker
      this.inside.postMessage = (data) =>
        this.dispatchEvent(new MessageEvent("message", { data }))
      this.inside.importScripts = (...urls) =>
        urls.reduce((before, one) => before.then(() => this.load(one)), Promise.resolve())
      this.ready = this.load(url)
    }
    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script")
        script.src = url
        script.onload = resolve
        script.onerror = () => reject(new Error(`${url} cannot be loaded`))
        this.inside.document.body.append(script)
      })
    }
    postMessage(data) {
      this.ready.then(() =>
        this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })))
    }
  }
}
