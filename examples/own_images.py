# Your own images, from folders to a model
#
# Run it from top to bottom (python own_images.py, some seconds), or cell by cell in an editor that knows `# %%`. The
# images are drawn by the script that `raylt new example` writes. For your own images, remove the drawing and set SHOPS.

# %% Folders: <client>/<class>/<image>
import subprocess
import sys
from pathlib import Path

import numpy
from PIL import Image

import raylt

SHOPS = Path("shops")
if not SHOPS.exists():
    subprocess.run([sys.executable, "-m", "raylt", "new", "example"], check=True)
    subprocess.run([sys.executable, "eight_shops.py", str(SHOPS), "--most", "20"], check=True)

# %% Train: each shop keeps a classifier of its own on top of a shared encoder
run = raylt.run(
    "fedper",
    source=f"folder:{SHOPS}",
    size=16,
    bad="skip",  # some of the drawn files are damaged on purpose
    model="small",
    rounds=3,
    fleet="local",
    quiet=True,
    out="runs",
    name="shops",
)

# %% Look at the data that each client holds, and at its accuracy on its own test images
raylt.draw_data(run.task, "runs/shops/data.png")
last = run.clients.query("metric == 'local' and step == step.max()")
names = dict(enumerate(run.task.client_names))
print(last.set_index(last.client.map(names)).value.mul(100).round(1).to_string())

# %% Export the model of one shop; the file has class names and preprocessing
file = raylt.export(run, client="Wien")
print(file)

# %% Use it in another program: images are uint8 [n, height, width, channels] of the size that it was trained with
model = raylt.load_model(file)
height, width, _ = model.shape
photo = Image.open(SHOPS / "Wien" / "shirt" / "0001.jpg").convert("RGB").resize((width, height))
prediction = model.predict(numpy.asarray(photo)[None])
print(prediction.names[0], f"{prediction.probabilities.max():.2f}")
