MODEL = ["--model.name=resnet18"]
