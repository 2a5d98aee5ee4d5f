MODEL = ["--model.layers=2", "--model.width=32", "--model.heads=2", "--model.hidden=64"]
