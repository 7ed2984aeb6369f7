// Search as you type, with Pagefind's index beside the pages. A page opened from a folder cannot fetch it: then the
// form leads to Sphinx's own search page.
addEventListener('DOMContentLoaded', () => {
  const dialog = document.getElementById('pst-search-dialog')
  if (!dialog || location.protocol === 'file:') return
  const place = new URL((document.documentElement.dataset.content_root || './') + 'pagefind/', location.href)
  let ready

  async function mount() {
    const style = Object.assign(document.createElement('link'), {rel: 'stylesheet', href: place + 'pagefind-ui.css'})
    document.head.append(style)
    await new Promise((done, failed) => document.head.append(Object.assign(document.createElement('script'),
      {src: place + 'pagefind-ui.js', onload: done, onerror: failed})))
    dialog.append(Object.assign(document.createElement('div'), {id: 'find'}))
    new PagefindUI({element: '#find', bundlePath: place.href, showSubResults: true, showImages: false, resetStyles: false,
      pageSize: 10, excerptLength: 18, autofocus: true, translations: {placeholder: 'Search the pages and the reference'}})
    dialog.querySelector('form')?.setAttribute('hidden', '')
  }
  new MutationObserver(() => {
    if (dialog.open) (ready ??= mount()).then(() => dialog.querySelector('#find input')?.focus(), () => {})
  }).observe(dialog, {attributes: true, attributeFilter: ['open']})
})
