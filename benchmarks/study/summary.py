def write(*a):
    return ["todo"]
