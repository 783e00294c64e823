function select(code) {
  const range = document.createRange();
  range.selectNodeContents(code);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
}
addEventListener('click', async (event) => {
  const button = event.target.closest('.copy');
  if (!button) return;
  const code = button.nextElementSibling;
  select(code);
  // A page opened from a file may have no clipboard: then the text is selected.
  try { await navigator.clipboard.writeText(code.textContent); button.textContent = 'copied'; }
  catch (error) { button.textContent = document.execCommand('copy') ? 'copied' : 'selected'; }
});
