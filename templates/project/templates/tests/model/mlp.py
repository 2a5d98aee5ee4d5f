MODEL = ["--model.layers=2", "--model.width=16"]
