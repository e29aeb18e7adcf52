// Read picture files as data URLs, which the API takes.

const LARGEST_SIDE = 1024;
const SENT_AS_IS = new Set(["image/png", "image/jpeg", "image/webp", "image/gif"]);
const SMALL_BYTES = 300_000;

/** Return the pictures among the files, larger ones scaled down to 1,024 pixels. Throws an Error with the bad file. */
export const readPictures = (files: Iterable<File>): Promise<string[]> => Promise.all([...files].map(readPicture));

async function readPicture(file: File): Promise<string> {
  if (!file.type.startsWith("image/")) throw new Error(`${file.name} is no picture.`);
  if (SENT_AS_IS.has(file.type) && file.size <= SMALL_BYTES) return readAsDataUrl(file);
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) throw new Error(`The browser cannot read ${file.name}: use PNG, JPEG or WebP.`);
  const scale = Math.min(1, LARGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  if (context) {
    // JPEG turns transparency to black; the server composes on white.
    context.fillStyle = "white";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  }
  return canvas.toDataURL("image/jpeg", 0.9);
}

function readAsDataUrl(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(new Error(`Cannot read ${file.name}.`));
    reader.readAsDataURL(file);
  });
}
